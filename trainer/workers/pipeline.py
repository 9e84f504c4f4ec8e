"""The threads of a run around the channel: one a target of the roles, one a replica."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate
from trainer.contract.config import TrainConfig
from trainer.data.packing import BatchMaker
from trainer.metrics import Flow
from trainer.model.target import Target
from trainer.sync import GradientSync
from trainer.workers.drafter import DrafterWorker, Replica, StepDone, StepRange
from trainer.workers.pace import PaceWatch
from trainer.workers.supervisor import Patience, Pulse, StopRequest, Supervisor, WatchSettings
from trainer.workers.target import FeatureCache, Prepared, TargetWorker
from trainer.workers.transfer import Transfer

# A batch of a target takes seconds. A thread that is left out for no fault of its own costs no more
# than a batch made twice; without any target thread the run is lost, so that takes longer.
_PATIENCE_S = 45.0
_END_S = 300.0
_TIMES_USUAL = 10.0
_TIMES_PATIENCE = 5.0
# A target thread makes a batch while the one before waits to be handed over. What was let go is
# free once the forwards that were started before are done: one, or two when a drafter lets go.
_OF_TARGET = 3
_LET_GO_LATE = 1


@dataclass
class Pipeline:
    """The parts of a run, warm and ready; ``run`` is called once.

    targets: one a target thread, of which several may be the same. gpus: theirs, as people call
    them; the devices' names where left out. report: gets what does not end the run. on_step:
    called in the thread of rank 0, between steps.
    """

    config: TrainConfig
    gate: CompileGate
    maker: BatchMaker
    targets: Sequence[Target]
    replicas: Sequence[Replica]
    steps: StepRange
    stop: StopRequest
    run_dir: Path
    report: Callable[..., object]
    on_step: Callable[[StepDone, Pulse], None]
    gpus: Sequence[str] = ()
    channel: OrderedChannel[Prepared] = field(init=False)
    supervisor: Supervisor = field(init=False)
    transfer: Transfer = field(init=False)
    pace: PaceWatch = field(init=False)

    def __post_init__(self) -> None:
        run, each = self.config.run, self.steps.batches_per_step
        depth = run.queue_depth
        self.channel = OrderedChannel(
            None if depth is None else max(depth, len(self.replicas)),
            self.steps.first * each,
            stop=self.steps.num_steps * each,
            max_bytes=run.queue_bytes,
            makers=len(self.targets),
        )
        self.transfer, self.pace = Transfer(self._devices()), PaceWatch()
        self._target_workers: list[TargetWorker] = []
        self._sync = GradientSync(len(self.replicas))
        self.supervisor = Supervisor(
            self.gate,
            WatchSettings(self.config.compile.watchdog_s, self.config.compile.limit_s),
            stop=self.stop,
            abandon=self._abandon,
            report=self.report,
        )

    def run(self) -> None:
        """Add every thread and run all to their end.

        Raises: WorkerError with the name of the thread that failed first and its error.
        """
        self.add_targets()
        self.add_drafters()
        self.run_added()

    def run_added(self) -> None:
        """Run the threads that were added to the supervisor. Raises: as ``run``."""
        cards = {d for d in self._devices() if d.type == "cuda"}
        if cards:
            # The warm-up ran on the default stream, which the threads' streams do not wait for, and
            # what its memory pool keeps is no use to others.
            for card in cards:
                torch.cuda.synchronize(card)
            torch.cuda.empty_cache()
            self._make_room()
        self.supervisor.run_all()
        # The threads' streams are not those of who comes next. Targets have nothing left to do, and
        # the card of one that failed may give errors only.
        for card in cards & {replica.device for replica in self.replicas}:
            torch.cuda.synchronize(card)

    @property
    def flow(self) -> Flow:
        """The state of the queue."""
        channel = self.channel
        return Flow(channel.depth, channel.put_wait_s, channel.get_wait_s, channel.size_bytes)

    def sound_target(self) -> Target:
        """Return the first target whose thread is not left out and, if there is one, is not slow.

        Its card can be trusted with further work, such as decoding.
        """
        working = [w for w in self._target_workers if not w.out.is_set()]
        slow = self.pace.slow
        usual = [worker for worker in working if worker.name not in slow]
        return next((worker.target for worker in (*usual, *working)), self.targets[0])

    def drafters_are_sound(self) -> bool:
        """Say, after a failure, whether what the drafters had at the last step can be saved."""
        blamed = any(name.startswith("drafter") for name in self.supervisor.at_fault())
        lost = {worker.target.device for worker in self._target_workers if worker.out.is_set()}
        shared = {r.device for r in self.replicas if r.device.type == "cuda"} & lost
        return not blamed and not shared

    def _make_room(self) -> None:
        """Take what hidden states can need at once, so that nothing more is taken in the run."""
        num_tokens = max(batch.input_ids.numel() for batch in self.maker.examples())
        width = int(self.replicas[0].draft.fc.weight.shape[1])
        size_bytes = num_tokens * width * self.targets[0].dtype.itemsize
        waiting = self.config.run.queue_bytes // size_bytes + 1  # the next needed always may
        depth = self.config.run.queue_depth
        waiting = waiting if depth is None else min(waiting, depth)
        targets = [target.device for target in self.targets]
        drafters = [replica.device for replica in self.replicas]
        for device, count in most_batches(targets, drafters, waiting).items():
            if not self.transfer.memory.make_room(device, size_bytes, count):
                self.report(
                    f"{device} has no room beside the rest for {count} batches of hidden states,"
                    f" {size_bytes / 1e9:.2f} GB each: the run ends for want of memory if the queue"
                    " fills; lower run.queue_depth, run.queue_bytes or data.token_budget"
                )

    def _devices(self) -> list[torch.device]:
        return [*(target.device for target in self.targets), *(r.device for r in self.replicas)]

    def _abandon(self, name: str, error: BaseException | None) -> None:
        if error is None:
            self.channel.close()
        else:
            self.channel.fail(name, error)
        self._sync.abort()

    def _patience(self) -> Patience:
        """Return how long a target thread may stand still, by what its batches usually take."""
        settings, usual_s = self.config.compile, self.pace.usual_s
        if usual_s is None:  # libraries tune their kernels in the first batch
            return Patience(settings.watchdog_s, settings.limit_s)
        patience_s = max(min(_PATIENCE_S, settings.watchdog_s), _TIMES_USUAL * usual_s)
        end_s = max(_END_S, _TIMES_PATIENCE * patience_s)
        return Patience(patience_s, min(settings.limit_s, end_s))

    def add_targets(self) -> None:
        """Add the target threads, which feed the channel."""
        cache = FeatureCache(self.config.target.cache_bytes)
        gpus = self.gpus or [str(target.device) for target in self.targets]
        for number, (target, gpu) in enumerate(zip(self.targets, gpus, strict=True)):
            worker = TargetWorker(
                name=f"target-{number}",
                gpu=gpu,
                target=target,
                maker=self.maker,
                cache=cache,
                channel=self.channel,
                transfer=self.transfer,
                drafters=[replica.device for replica in self.replicas],
                gate=self.gate,
                pace=self.pace,
                report=self.report,
                cpu_threads=self.config.run.cpu_threads,
            )
            self._target_workers.append(worker)
            self.supervisor.add(worker.name, worker.run, worker.relief(self._patience))

    def add_drafters(self) -> None:
        """Add the drafter threads, which empty the channel."""
        for replica in self.replicas:
            worker = DrafterWorker(
                replica=replica,
                steps=self.steps,
                channel=self.channel,
                sync=self._sync,
                gate=self.gate,
                config=self.config,
                stop=self.stop,
                on_step=self.on_step,
                run_dir=self.run_dir,
            )
            self.supervisor.add(f"drafter-{replica.rank}", worker.run)


def most_batches(
    targets: Sequence[torch.device], drafters: Sequence[torch.device], waiting: int
) -> dict[torch.device, int]:
    """Return of how many batches a device can hold the hidden states at once.

    One device a thread of each role, which several threads may share. waiting: batches of the
    queue, which go to the drafters in turn.
    """
    counts = dict.fromkeys([*targets, *drafters], 0)
    for device in targets:
        counts[device] += _OF_TARGET
    for device in set(targets) & set(drafters):
        counts[device] += _LET_GO_LATE
    for device in drafters:
        counts[device] += -(-waiting // len(drafters)) + 1  # and the one it trains on
    return counts
