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
from trainer.workers.supervisor import Pulse, StopRequest, Supervisor, WatchSettings
from trainer.workers.target import FeatureCache, Prepared, TargetWorker
from trainer.workers.transfer import Transfer


@dataclass
class Pipeline:
    """The parts of a run, warm and ready; ``run`` is called once.

    targets: one a target thread, of which several may be the same. report: gets what does not end
    the run. on_step: called in the thread of rank 0, between steps.
    """

    config: TrainConfig
    gate: CompileGate
    maker: BatchMaker
    targets: Sequence[Target]
    replicas: Sequence[Replica]
    steps: StepRange
    stop: StopRequest
    run_dir: Path
    report: Callable[[str], object]
    on_step: Callable[[StepDone, Pulse], None]
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
        """Return the first target whose thread was not left out and, if there is one, is not slow.

        Its card can be trusted with further work, such as decoding.
        """
        working = [w for w in self._target_workers if not w.failed.is_set()]
        slow = self.pace.slow
        usual = [worker for worker in working if worker.name not in slow]
        return next((worker.target for worker in (*usual, *working)), self.targets[0])

    def _devices(self) -> list[torch.device]:
        return [*(target.device for target in self.targets), *(r.device for r in self.replicas)]

    def _abandon(self, name: str, error: BaseException | None) -> None:
        if error is None:
            self.channel.close()
        else:
            self.channel.fail(name, error)
        self._sync.abort()

    def add_targets(self) -> None:
        """Add the target threads, which feed the channel."""
        cache = FeatureCache(self.config.target.cache_bytes)
        for number, target in enumerate(self.targets):
            worker = TargetWorker(
                name=f"target-{number}",
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
            self.supervisor.add(worker.name, worker.run)

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
