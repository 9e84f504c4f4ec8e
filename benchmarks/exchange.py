"""What it costs that several drafters add up their gradients, on synthetic hidden states.

    python -m benchmarks.exchange --case B --drafters 2 [--steps 20] [--accumulation 2]

Runs the trainer's own drafter threads, one a GPU (on the CPU all share it), three ways: one drafter
alone; all of them, exchanging while backward goes on; and all of them, exchanging after it. Prints
one JSON line a way: the median time of a step, and whether all replicas ended with the same weights
to the bit. Time beyond that of one alone is what the exchange, and threads in one process, cost.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.draft_step import CASES, Case, draft_config, make_batch, random_head, train_config
from trainer import assembly
from trainer.channel import OrderedChannel
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.config import OptimConfig, TrainConfig
from trainer.device import current_device
from trainer.learning_rate import Schedule
from trainer.model.draft import DraftModel
from trainer.model.target import FrozenHead
from trainer.optim import DraftOptimizer
from trainer.sync import GradientSync
from trainer.workers.drafter import DrafterWorker, Replica, StepDone, StepRange, forward_backward
from trainer.workers.supervisor import Pulse, StopRequest
from trainer.workers.target import Prepared

_WARMUP = 5


class AfterBackward(GradientSync):
    """Exchanges when the whole backward is done, to measure what overlapping brings."""

    def _came(self, rank: int, place: int, number: int) -> None:
        """Leave the gradient for the end."""


class Bench:
    """Replicas on their devices and a batch for each."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.config: TrainConfig = train_config(case, options.device)
        self.options = options
        self.gate = CompileGate(GateSettings(compile=options.device != "cpu"))
        attention = assembly.attention_of(self.config, draft_config(case), self.gate)
        self.replicas: list[Replica] = []
        self.prepared: list[Prepared] = []
        for rank in range(options.drafters):
            device = torch.device("cpu")
            if options.device != "cpu":
                device = torch.device("cuda", rank % torch.cuda.device_count())
            with current_device(device):
                draft = DraftModel(draft_config(case), device=device, attention=attention)
                draft.train()
                optimizer = DraftOptimizer(draft, OptimConfig(lr=1e-5), Schedule(10_000, 0, 1.0))
                head = self._head(case, device, draft.fc.weight.dtype)
                self.replicas.append(Replica(rank, draft, head, optimizer, device))
                hidden = torch.randn(
                    case.rows, case.length, draft.fc.in_features, dtype=draft.fc.weight.dtype
                )
                self.prepared.append(Prepared(make_batch(case, str(device)), hidden.to(device)))

    def _head(self, case: Case, device: torch.device, dtype: torch.dtype) -> FrozenHead:
        for replica in self.replicas:
            if replica.device == device:
                return replica.head
        return random_head(case.shapes, str(device), dtype)

    def run(self, sync: GradientSync, num_drafters: int) -> dict[str, Any]:
        """Take steps with the first ``num_drafters`` replicas."""
        options, replicas = self.options, self.replicas[:num_drafters]
        for replica in replicas:
            replica.optimizer.arrange_gradients(num_drafters, options.accumulation)
            with current_device(replica.device):
                forward_backward(replica, self.gate, self.prepared[replica.rank], self.config)
                replica.optimizer.rehearse()
                if replica.device.type == "cuda":
                    torch.cuda.synchronize()
        steps = StepRange(0, _WARMUP + options.steps, num_drafters, options.accumulation)
        channel: OrderedChannel[Prepared] = OrderedChannel(steps.num_steps * steps.batches_per_step)
        for index in range(steps.num_steps * steps.batches_per_step):
            channel.put(index, self.prepared[index % num_drafters])
        ended: list[float] = []

        def on_step(_done: StepDone, _pulse: Pulse) -> None:
            ended.append(time.perf_counter())

        self._take_steps(replicas, steps, channel, sync, on_step)
        times = [(b - a) * 1e3 for a, b in zip(ended[_WARMUP - 1 :], ended[_WARMUP:], strict=False)]
        masters = [self._weights(replica) for replica in replicas]
        return {
            "drafters": num_drafters,
            "accumulation": options.accumulation,
            "step_ms": round(statistics.median(times), 2),
            "min_ms": round(min(times), 2),
            "max_ms": round(max(times), 2),
            "same_to_the_bit": all(torch.equal(masters[0], one) for one in masters[1:]),
        }

    def _weights(self, replica: Replica) -> Tensor:
        """Return sums of each tensor's bits, which tell replicas apart."""
        masters = replica.optimizer.masters().values()
        return torch.stack([m.view(torch.int32).sum(dtype=torch.int64) for m in masters]).cpu()

    def _take_steps(
        self,
        replicas: list[Replica],
        steps: StepRange,
        channel: OrderedChannel[Prepared],
        sync: GradientSync,
        on_step: Any,
    ) -> None:
        failed: list[BaseException] = []

        def body(replica: Replica, run_dir: Path) -> None:
            worker = DrafterWorker(
                replica=replica,
                steps=steps,
                channel=channel,
                sync=sync,
                gate=self.gate,
                config=self.config,
                stop=StopRequest(),
                on_step=on_step,
                run_dir=run_dir,
            )
            try:
                worker.run(Pulse())
            except BaseException as error:
                failed.append(error)
                sync.abort()
                raise

        with tempfile.TemporaryDirectory() as directory:
            threads: list[threading.Thread] = [
                self.gate.spawn(
                    lambda replica=replica: body(replica, Path(directory)),
                    f"drafter-{replica.rank}",
                )
                for replica in replicas
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]


def main() -> int:
    """Measure the three ways; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), default="B")
    parser.add_argument("--drafters", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    bench = Bench(CASES[options.case], options)
    try:
        for way, make, count in (
            ("during backward", GradientSync, options.drafters),
            ("after backward", AfterBackward, options.drafters),
            ("alone", GradientSync, 1),
        ):
            found = {"case": options.case, "way": way} | bench.run(make(count), count)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    finally:
        bench.gate.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
