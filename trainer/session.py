"""One training run from its manifest to its export: ``python -m trainer train --run-dir DIR``.

SIGINT or SIGTERM ends it after the current step, with a checkpoint and status 10; a second signal
leaves the step at once and saves the last finished one.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import assembly, checkpoint
from trainer.channel import OrderedChannel
from trainer.checkpoint import CheckpointState, Trained
from trainer.compile_gate import CompileEvent, CompileGate, end_process
from trainer.contract.completion import PARTIAL_SUFFIX, latest_complete, step_directory
from trainer.contract.errors import ConfigError
from trainer.contract.evaluations import EMA, RAW, Evaluations
from trainer.contract.exit_record import TrainerExit
from trainer.data.dataset import load_tokenizer
from trainer.errors import CheckpointError
from trainer.export import export_draft
from trainer.held_out import (
    HeldOut,
    PromptSet,
    draft_copy,
    load_prompt_sets,
    num_in_training,
)
from trainer.metrics import Flow, Metrics, SampleLog, StepFigures, Totals
from trainer.model.draft import DraftModel
from trainer.model.target import Target
from trainer.optim import Schedule
from trainer.sync import GradientSync
from trainer.workers.drafter import DrafterWorker, Replica, StepDone, StepRange, forward_backward
from trainer.workers.supervisor import Pulse, StopRequest, Supervisor, WatchSettings
from trainer.workers.target import (
    FeatureCache,
    IndexCounter,
    Prepared,
    TargetWorker,
    gated_features,
)


class Session:
    """A run in its directory; ``train`` is called once."""

    def __init__(self, run_dir: Path, *, resume: bool) -> None:
        self._run_dir = run_dir
        self._manifest, self._config = assembly.read_manifest(run_dir)
        self._checkpoints = run_dir / "checkpoints"
        # Digests are worth their seconds on resume: a damaged newest one is then passed over.
        found, self._skipped = latest_complete(self._checkpoints, digests=resume)
        if found is not None and not resume:
            raise ConfigError(f"{run_dir} holds {found.name}; go on from it with --resume")
        self._resume_from = found if resume else None
        self._resume = resume
        self._devices = assembly.devices_of(self._manifest, self._config)
        settings = assembly.gate_settings(self._config, len(self._devices.drafters))
        self._stop = StopRequest()
        self._metrics = Metrics(
            run_dir / "metrics.jsonl", self._manifest.run_id, self._devices.labels
        )
        self._supervisor: Supervisor | None = None
        self._gate = CompileGate(
            settings,
            on_event=self._compiled,
            report=self._metrics.warning,
            on_limit=self._gate_failed,
        )
        self._done = 0
        self._trained = Trained()
        self._saved: int | None = None
        self._identity: dict[str, Any] = {}
        self._held_out: HeldOut | None = None
        self._samples = SampleLog(run_dir) if self._config.run.log_samples else None
        self._evaluations = Evaluations.read(run_dir)
        self.replicas: list[Replica] = []  # one a drafter, once they are built

    def train(self) -> TrainerExit:
        """Train to the end of the plan or to a stop request; returns the exit status.

        Raises: TrainerError or ContractError by name when the run cannot go on.
        """
        try:
            with _signals(self._stop):
                state, status = self._train()
            self._metrics.finished(state, self._done)
        except BaseException as error:
            self._metrics.finished("failed", self._done, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._gate.close()
            self._metrics.close()
        return status

    def _train(self) -> tuple[str, TrainerExit]:
        config, metrics = self._config, self._metrics
        metrics.phase("data", path=config.data.path)
        data = assembly.Data.load(self._manifest, config)
        if data.dataset.num_bad:
            worst = "; ".join(str(bad) for bad in data.dataset.bad_lines[:3])
            metrics.warning(f"{data.dataset.num_bad} lines of {config.data.path} skipped: {worst}")
        prompts = self._prompt_sets(data)
        steps = assembly.step_range(config, data.plan, len(self._devices.drafters))
        metrics.phase("load", target=config.target.path)
        targets = assembly.load_targets(config, self._devices.targets)
        target = next(iter(targets.values()))
        metrics.note(str(assembly.settle_targets(targets, config, self._gate)))
        if config.compile.gate == "off":
            metrics.warning("compile.gate is off, an experiment: threads may crash or hang")
        if self._stop.soft.is_set():
            metrics.warning("stopped before the first step; there is nothing to save")
            return "stopped", TrainerExit.STOPPED
        if prompts:
            self._held_out = HeldOut(prompts, target, self._gate, config.evaluation)
        self._identity = assembly.identity(config, target, self._manifest, steps)
        state = self._loaded(self._identity)
        replicas = self.replicas = self._build(data, target, steps, state)
        self._metrics.note(f"{len(data.dataset.samples)} samples, {steps.num_steps} steps")
        self._warm_up(replicas, data, targets)
        steps = replace(steps, first=self._done)
        if self._done and self._done not in self._evaluations.entries:
            self._evaluate_when_due(replicas[0], steps, None)  # a kill came before it
        self._run(data, targets, replicas, steps)
        self._save(replicas[0], steps)
        if self._done < steps.num_steps:
            return "stopped", TrainerExit.STOPPED
        if config.run.export_at_end:
            metrics.phase("export", path="export")
            draft = self._export_draft(replicas[0])
            export_draft(draft, self._run_dir / "export", config.target)
        return "finished", TrainerExit.FINISHED

    def _refuse_to_start_over(self) -> None:
        """Stop a resume that found finished checkpoints but none whole: days may be in them."""
        damaged = [s for s in self._skipped if not s.path.name.endswith(PARTIAL_SUFFIX)]
        if self._resume and damaged:
            reasons = "; ".join(f"{s.path.name}: {s.reason}" for s in damaged)
            raise CheckpointError(
                f"no checkpoint in {self._checkpoints} is whole ({reasons}); mend or move them,"
                " or launch under a new tag to start over"
            )

    def _loaded(self, identity: dict[str, Any]) -> CheckpointState | None:
        for skipped in self._skipped if self._resume else ():
            self._metrics.warning(f"checkpoint {skipped.path.name} skipped: {skipped.reason}")
        if self._resume_from is None:
            self._refuse_to_start_over()
            if self._resume:
                self._metrics.warning("no complete checkpoint; starting from step 0")
            return None
        state = checkpoint.load(self._resume_from)
        for change in state.check_identity(identity, assembly.may_change):
            self._metrics.warning(f"changed since the checkpoint: {change}")
        self._metrics.phase("resume", step=state.step, path=self._resume_from.name)
        return state

    def _build(
        self,
        data: assembly.Data,
        target: Target,
        steps: StepRange,
        state: CheckpointState | None,
    ) -> list[Replica]:
        config = self._config
        schedule = Schedule.from_config(config.optim, steps.num_steps)
        scale: Tensor | None = None
        if config.draft.normalise_taps:
            measured = state is None
            scale = assembly.tap_scale(target, data.dataset, self._gate) if measured else None
            scale = scale if state is None else state.extras["tap_scale"]
        attention = assembly.attention_of(config, self._gate)
        replicas = [
            assembly.build_replica(config, target, place, attention, schedule, scale)
            for place in enumerate(self._devices.drafters)
        ]
        if state is not None:
            for replica in replicas:
                replica.optimizer.load(state.masters, state.optimizer, state.average)
            if config.optim.ema_decay is not None and not state.average:
                self._metrics.warning("the checkpoint has no average; it begins at its weights")
            self._done = self._saved = state.step
            self._trained = state.trained
            checkpoint.set_random_state(state.extras)
        self._evaluations.forget_after(self._done)
        for line in (*replicas[0].optimizer.describe(), schedule.describe(self._done)):
            self._metrics.note(line)
        totals = Totals(self._trained.tokens, self._trained.anchors)
        self._metrics.begin(self._done, steps.num_steps, config.run.log_every_steps, totals)
        return replicas

    def _warm_up(
        self, replicas: list[Replica], data: assembly.Data, targets: dict[str, Target]
    ) -> None:
        """Compile in this thread what the workers will need, then allow no further compile."""
        if not assembly.compiles(self._config):
            return
        self._metrics.phase("warmup", devices=len(replicas))
        batch = data.maker.make(0)
        for target in targets.values():
            with assembly.current_device(target.device):
                hidden = gated_features(self._gate, target, batch, FeatureCache(0))
        for replica in replicas:
            with assembly.current_device(replica.device):
                replica.draft.train()
                forward_backward(replica, self._gate, Prepared(batch, hidden), self._config)
                replica.optimizer.clear()  # a warm-up changes no weight
        if self._config.data.packing:  # rows come in many lengths; packed rows in one
            self._gate.seal()

    def _run(
        self,
        data: assembly.Data,
        targets: dict[str, Target],
        replicas: list[Replica],
        steps: StepRange,
    ) -> None:
        config = self._config
        first, stop = (step * steps.batches_per_step for step in (steps.first, steps.num_steps))
        depth = max(config.run.queue_depth, len(replicas))
        channel: OrderedChannel[Prepared] = OrderedChannel(depth, first)
        sync = GradientSync(len(replicas))

        def abandon(name: str, error: BaseException | None) -> None:
            if error is None:
                channel.close()
            else:
                channel.fail(name, error)
            sync.abort()

        supervisor = self._supervisor = Supervisor(
            self._gate,
            WatchSettings(config.compile.watchdog_s, config.compile.limit_s),
            stop=self._stop,
            abandon=abandon,
            report=self._metrics.warning,
        )
        cache, counter = FeatureCache(config.target.cache_bytes), IndexCounter(first, stop)
        for number, device in enumerate(self._devices.targets):
            worker = TargetWorker(
                target=targets[str(device)],
                maker=data.maker,
                cache=cache,
                counter=counter,
                channel=channel,
                gate=self._gate,
                cpu_threads=config.run.cpu_threads,
            )
            supervisor.add(f"target-{number}", worker.run)

        def on_step(done: StepDone, pulse: Pulse) -> None:
            self._stepped(done, channel)
            if done.num_done % config.run.checkpoint_every_steps == 0:
                self._try_to_save(replicas[0], steps)
            self._evaluate_when_due(replicas[0], steps, pulse)

        for replica in replicas:
            drafter = DrafterWorker(
                replica=replica,
                steps=steps,
                channel=channel,
                sync=sync,
                gate=self._gate,
                config=config,
                stop=self._stop,
                on_step=on_step,
                run_dir=self._run_dir,
            )
            supervisor.add(f"drafter-{replica.rank}", drafter.run)
        self._metrics.phase("train", step=steps.first, num_steps=steps.num_steps)
        supervisor.run_all()

    def _stepped(self, done: StepDone, channel: OrderedChannel[Prepared]) -> None:
        self._done, sums = done.num_done, done.sums
        visits = [(batch.epoch, one) for batch in sums.batches for one in batch.sample_ids]
        self._trained = self._trained.after(sums.num_tokens, sums.num_anchors, visits)
        if self._samples is not None:
            self._samples.write(done.num_done, sums.batches)
        self._metrics.step(
            StepFigures(
                step=done.num_done,
                epoch=done.epoch,
                loss=sums.loss_sum / max(sums.weight_sum, 1e-12),
                lr=done.applied.lr,
                grad_norm=done.applied.grad_norm,
                num_tokens=sums.num_tokens,
                num_anchors=sums.num_anchors,
                slot_accuracy=sums.num_hits / max(sums.num_slots, 1),
                expected_accepted=sums.num_accepted / max(sums.num_anchors, 1),
                step_s=done.step_s,
                variant=sums.ratios(),
            ),
            Flow(channel.depth, channel.put_wait_s, channel.get_wait_s),
        )

    def _try_to_save(self, replica: Replica, steps: StepRange) -> None:
        try:
            self._save(replica, steps)
        except OSError as error:  # a full disk; the next try, or the last, may find room
            self._metrics.warning(f"no checkpoint at step {self._done}: {error}")

    def _save(self, replica: Replica, steps: StepRange) -> None:
        if self._saved == self._done:
            return
        began, best = time.monotonic(), self._evaluations.best()
        state = CheckpointState(
            step=self._done,
            next_index=self._done * steps.batches_per_step,
            identity=self._identity,
            masters=replica.optimizer.masters(),
            optimizer=replica.optimizer.state(),
            trained=self._trained,
            extras={"tap_scale": replica.draft.tap_scale} | checkpoint.random_state(),
            average=replica.optimizer.average(),
        )
        path = checkpoint.save(
            self._checkpoints,
            state,
            keep=self._config.run.keep_checkpoints,
            best=None if best is None else best.step,
        )
        self._saved = self._done
        self._metrics.checkpoint(self._done, path, time.monotonic() - began)

    def _prompt_sets(self, data: assembly.Data) -> list[PromptSet]:
        """Read the held-out prompts, if there are to be evaluations; warn of those trained on."""
        if self._config.evaluation.every_steps is None:
            return []
        target = self._config.target
        sets = load_prompt_sets(self._config, load_tokenizer(target.path, target.revision))
        for name, count in num_in_training(sets, data.dataset.samples).items():
            if count:
                of = len(next(one.prompts for one in sets if one.name == name))
                self._metrics.warning(
                    f"evaluation.prompts.{name}: {count} of {of} prompts are in the training data;"
                    " their acceptance length says little"
                )
        return sets

    def _evaluate_when_due(self, replica: Replica, steps: StepRange, pulse: Pulse | None) -> None:
        """Decode the held-out prompts after every evaluation.every_steps steps and the last one."""
        every, step = self._config.evaluation.every_steps, self._done
        if every is None or self._held_out is None or (step % every and step != steps.num_steps):
            return
        self._try_to_save(replica, steps)  # what measures best must be there to be kept
        self._metrics.phase("evaluate", step=step)
        entry = self._measured(replica, self._held_out, pulse)
        if entry is None:
            self._metrics.warning(f"evaluation of step {step} left out: asked to stop")
        else:
            self._evaluations.entries[step] = entry
            try:
                self._evaluations.write(self._run_dir)
            except OSError as error:
                self._metrics.warning(f"evaluations.json was not written: {error}")
            self._tell_evaluation(entry)
        if pulse is not None:
            self._metrics.phase("train", step=step, num_steps=steps.num_steps)

    def _measured(
        self, replica: Replica, held_out: HeldOut, pulse: Pulse | None
    ) -> dict[str, Any] | None:
        def keep_going(what: str) -> bool:
            if pulse is not None:
                pulse.beat(what)
            return not self._stop.soft.is_set()

        began, device = time.monotonic(), held_out.target.device
        entry: dict[str, Any] = {"step": self._done, "saved": self._saved == self._done}
        kinds = {RAW: replica.optimizer.masters(), EMA: replica.optimizer.average()}
        with assembly.current_device(device):
            for kind, weights in kinds.items():
                if not weights:
                    continue
                copy = draft_copy(replica.draft, device, weights)
                measured = held_out.measure(copy, keep_going)
                if measured is None:
                    return None
                entry[kind] = measured
        return entry | {"evaluation_s": round(time.monotonic() - began, 3)}

    def _tell_evaluation(self, entry: dict[str, Any]) -> None:
        best = self._evaluations.best()
        told = {f"best_{key}": value for key, value in vars(best).items()} if best else {}
        facts = {key: entry[key] for key in ("step", "evaluation_s")} | entry[RAW]
        self._metrics.evaluation(facts | {"ema": entry.get(EMA)} | told)

    def _export_draft(self, replica: Replica) -> DraftModel:
        """Return the draft with the weights that run.export_weights names."""
        chosen, best = self._config.run.export_weights, self._evaluations.best()
        weights = replica.optimizer.average() if chosen == EMA else replica.optimizer.masters()
        if chosen == "best":
            if best is None:
                self._metrics.warning("no evaluation was saved; the last weights are exported")
            else:
                state = checkpoint.load(self._checkpoints / step_directory(best.step))
                weights = state.average if best.weights == EMA else state.masters
                self._metrics.note(f"exporting the best: {best.weights} of step {best.step}")
        return draft_copy(replica.draft, torch.device("cpu"), weights)

    def _compiled(self, event: CompileEvent) -> None:
        self._metrics.compile(
            thread=event.thread,
            key=event.key,
            compile_s=round(event.seconds, 3),
            num_graphs=event.num_graphs,
            reasons=list(event.reasons),
            expected=event.expected,
        )

    def _gate_failed(self, error: Exception) -> None:
        if self._supervisor is not None:
            self._supervisor.fail("gate-watchdog", error)
        else:  # the warm-up: this very process's main thread hangs
            self._metrics.finished("failed", self._done, str(error))
            self._metrics.close()
            end_process(error)


@contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into stop requests."""

    def ask(_number: int, _frame: object) -> None:
        stop.ask()

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
