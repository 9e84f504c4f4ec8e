"""One training run from its manifest to its export: ``python -m trainer train --run-dir DIR``.

SIGINT or SIGTERM ends it after the current step, with a checkpoint and status 10; a second signal
leaves the step at once and saves the last finished one.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer import assembly, checkpoint
from trainer.compile_gate import CompileEvent, CompileGate
from trainer.contract.exit_record import TrainerExit
from trainer.contract.process_record import process_age_s
from trainer.errors import WorkerError
from trainer.evaluator import Evaluator, read_prompt_sets
from trainer.export import export_draft
from trainer.export.card import describe
from trainer.held_out import HeldOut
from trainer.learning_rate import Schedule
from trainer.metrics import Flow, Metrics, SampleLog, StepFigures, Totals
from trainer.model.target import Target
from trainer.run_state import RunState
from trainer.stacks import end_process
from trainer.workers.drafter import Replica, StepDone, StepRange
from trainer.workers.pipeline import Pipeline
from trainer.workers.supervisor import Pulse, StopRequest


class Session:
    """A run in its directory; ``train`` is called once."""

    def __init__(self, run_dir: Path, *, resume: bool) -> None:
        self._run_dir = run_dir
        self._manifest, self._config = assembly.read_manifest(run_dir)
        self._devices = assembly.devices_of(self._manifest, self._config)
        settings = assembly.gate_settings(self._config, len(self._devices.drafters))
        self._stop = StopRequest()
        self._metrics = Metrics(
            run_dir / "metrics.jsonl",
            self._manifest.run_id,
            self._devices.labels,
            experiments=self._config.compile.experiments,
        )
        self._has_started = False
        self._state = RunState(run_dir, self._config.run, self._metrics, resume=resume)
        self._pipeline: Pipeline | None = None
        self._gate = CompileGate(
            settings,
            on_event=self._compiled,
            report=self._metrics.warning,
            on_limit=self._gate_failed,
        )
        self._evaluator: Evaluator | None = None
        self._samples = SampleLog(run_dir) if self._config.run.log_samples else None
        self.replicas: list[Replica] = []  # one a drafter, once they are built

    def train(self) -> TrainerExit:
        """Train to the end of the plan or to a stop request; returns the exit status.

        Raises: TrainerError or ContractError by name when the run cannot go on.
        """
        try:
            with _signals(self._stop):
                state, status = self._train()
            self._metrics.finished(state, self._state.done)
        except BaseException as error:
            self._metrics.finished("failed", self._state.done, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._gate.close()
            self._metrics.close()
            if self._samples is not None:
                self._samples.close()
        return status

    def _train(self) -> tuple[str, TrainerExit]:
        config, metrics = self._config, self._metrics
        data = self._read_data()
        prompts = read_prompt_sets(config, data, metrics)
        steps = assembly.step_range(config, data.plan, len(self._devices.drafters))
        coverage = data.coverage(config, steps)
        for line in coverage.lines(data.epochs(steps), config.data.max_anchors):
            metrics.note(line)
        frac = round(coverage.per_epoch, 4)
        samples = len(data.dataset.samples)
        metrics.phase("load", target=config.target.path, coverage_frac=frac, samples=samples)
        targets = assembly.load_targets(config, self._devices.targets)
        target = next(iter(targets.values()))
        settled = assembly.settle_targets(targets, config, self._gate)
        metrics.note(str(settled))
        for line in settled.warnings:
            metrics.warning(line)
        for name in config.compile.experiments:
            metrics.warning(f"{name} is an experiment: the run may crash, hang or be slow")
        if self._stop.soft.is_set():
            metrics.warning("stopped before the first step; there is nothing to save")
            return "stopped", TrainerExit.STOPPED
        every_steps = config.evaluation.every_steps
        if every_steps is not None:
            held_out = HeldOut(prompts, target, self._gate, config.evaluation)
            self._evaluator = Evaluator(held_out, every_steps, self._state, metrics, self._stop)
        self._state.identity = assembly.identity(config, target, self._manifest, steps)
        replicas = self.replicas = self._build(data, target, steps)
        self._metrics.note(f"{samples} samples, {steps.num_steps} steps")
        self._warm_up(replicas, data, targets)
        steps = replace(steps, first=self._state.done)
        if self._evaluator is not None:  # of the checkpoint's step, when a kill came before it
            self._evaluator.evaluate_when_due(replicas[0], steps, None)
        self._run(data, targets, replicas, steps)
        self._state.save(replicas[0], steps)
        if self._state.done < steps.num_steps:
            return "stopped", TrainerExit.STOPPED
        if config.run.export_at_end:
            metrics.phase("export", path="export")
            draft, weights = self._state.export_draft(replicas[0])
            card = describe(self._run_dir, draft.config, weights)
            export_draft(draft, self._run_dir / "export", config.target, card=card)
        return "finished", TrainerExit.FINISHED

    def _read_data(self) -> assembly.Data:
        path = self._config.data.path
        self._metrics.phase("data", path=path)
        data = assembly.Data.load(self._manifest, self._config)
        if data.dataset.num_bad:
            worst = "; ".join(str(bad) for bad in data.dataset.bad_lines[:3])
            self._metrics.warning(f"{data.dataset.num_bad} lines of {path} skipped: {worst}")
        return data

    def _build(self, data: assembly.Data, target: Target, steps: StepRange) -> list[Replica]:
        config, state = self._config, self._state.load()
        schedule = Schedule.from_config(config.optim, steps.num_steps)
        scale: Tensor | None = None
        if config.draft.normalise_taps:
            measured = state is None
            scale = assembly.tap_scale(target, data.dataset, self._gate) if measured else None
            scale = scale if state is None else state.extras["tap_scale"]
        shape = assembly.draft_config(config, target)
        attention = assembly.attention_of(config, shape, self._gate)
        replicas = [
            assembly.build_replica(config, target, place, attention, schedule, scale)
            for place in enumerate(self._devices.drafters)
        ]
        replicas, findings = assembly.scale_heads(config, replicas)
        for finding in findings:
            self._metrics.phase("self-test", head_fp8=finding.products, **finding.figures)
        for replica in replicas:
            replica.optimizer.arrange_gradients(steps.num_drafters, steps.accumulation)
        if state is not None:
            for replica in replicas:
                replica.optimizer.load(state.masters, state.optimizer, state.average)
            if config.optim.ema_decay is not None and not state.average:
                self._metrics.warning("the checkpoint has no average; it begins at its weights")
            checkpoint.set_random_state(state.extras)
        done, trained = self._state.done, self._state.trained
        for line in (*replicas[0].optimizer.describe(), schedule.describe(done)):
            self._metrics.note(line)
        totals = Totals(trained.tokens, trained.anchors)
        self._metrics.begin(done, steps.num_steps, config.run.log_every_steps, totals)
        return replicas

    def _warm_up(
        self, replicas: list[Replica], data: assembly.Data, targets: dict[str, Target]
    ) -> None:
        """Compile in this thread what the workers will need, then allow no further compile."""
        if not assembly.compiles(self._config):
            return
        self._metrics.phase("warmup", devices=len(replicas))
        batches = data.maker.examples()
        told = assembly.warm_parts(self._gate, self._config, batches, targets.values(), replicas)
        for line in told:
            self._metrics.note(line)

    def _run(
        self,
        data: assembly.Data,
        targets: dict[str, Target],
        replicas: list[Replica],
        steps: StepRange,
    ) -> None:
        def on_step(done: StepDone, pulse: Pulse) -> None:
            self._stepped(done, pipeline.flow)
            if done.num_done % self._config.run.checkpoint_every_steps == 0:
                self._state.save_if_possible(replicas[0], steps)
            if self._evaluator is not None:
                target = pipeline.sound_target()
                self._evaluator.evaluate_when_due(replicas[0], steps, pulse, target)

        pipeline = self._pipeline = Pipeline(
            config=self._config,
            gate=self._gate,
            maker=data.maker,
            targets=[targets[str(device)] for device in self._devices.targets],
            replicas=replicas,
            steps=steps,
            stop=self._stop,
            run_dir=self._run_dir,
            report=self._metrics.warning,
            on_step=on_step,
            gpus=self._devices.target_gpus,
        )
        if route := pipeline.transfer.describe():
            self._metrics.note(route)
        self._metrics.phase("train", step=steps.first, num_steps=steps.num_steps)
        try:
            pipeline.run()
        except WorkerError:
            if self._state.done and pipeline.drafters_are_sound():
                self._save_last(replicas[0], steps)
            raise

    def _save_last(self, replica: Replica, steps: StepRange) -> None:
        """Save the last step of a run that ends for want of targets, and hang in nothing."""

        def save() -> None:
            try:
                if replica.device.type == "cuda":
                    torch.cuda.synchronize(replica.device)
                self._state.save(replica, steps)
            except Exception as error:  # noqa: BLE001 - the run fails with the error before
                self._metrics.warning(f"no checkpoint at step {self._state.done}: {error}")

        thread = threading.Thread(target=save, name="last-checkpoint", daemon=True)
        thread.start()
        thread.join(self._config.compile.limit_s)

    def _stepped(self, done: StepDone, flow: Flow) -> None:
        self._state.count(done)
        sums = done.sums
        if self._samples is not None:
            try:
                self._samples.write(done.num_done, sums.batches)
            except OSError as error:
                self._metrics.warning(f"samples.jsonl lacks step {done.num_done}: {error}")
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
            flow,
        )
        if not self._has_started:
            self._has_started = True
            stats = self._gate.stats
            self._metrics.started(
                done.num_done,
                start_s=round(process_age_s(), 2),
                num_compiles=stats.num_graphs,
                compile_s=round(stats.exclusive_s, 2),
            )

    def _compiled(self, event: CompileEvent) -> None:
        self._metrics.compile(
            thread=event.thread,
            device=event.device,
            key=event.key,
            compile_s=round(event.seconds, 3),
            num_graphs=event.num_graphs,
            reasons=list(event.reasons),
            expected=event.expected,
            sealed=event.sealed,
            cache=dict(event.cache),
            cache_hit=event.cache_hit,
            fallback=event.fallback,
        )

    def _gate_failed(self, error: Exception) -> None:
        if self._pipeline is not None:
            self._pipeline.supervisor.fail("gate-watchdog", error)
        else:  # the warm-up: this very process's main thread hangs
            self._metrics.finished("failed", self._state.done, str(error))
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
