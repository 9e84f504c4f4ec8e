"""What a run tells: events in metrics.jsonl and one short line each on standard output (the log).

All threads tell through one instance, so that the file has one writer. A disk that is full, or a
log that nobody reads any more, ends no training.
"""

import contextlib
import errno
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from trainer.contract.events import EventWriter
from trainer.contract.throughput import RECENT_S, Throughput

_WINDOW_STEPS = 50
_MIB = 1 << 20


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimiser step; ``step`` counts finished steps from 1.

    variant: what only this kind of draft has, by its key in the event.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    num_tokens: int
    num_anchors: int
    slot_accuracy: float
    expected_accepted: float
    step_s: float
    variant: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Flow:
    """State of the hidden-state channel: what waits in it, and seconds waited since the start."""

    q_hs: int
    target_wait_s: float
    drafter_wait_s: float
    q_hs_bytes: int = 0


@dataclass(frozen=True)
class Totals:
    """Tokens and anchors trained on since step 0, resumed runs included."""

    tokens: int = 0
    anchors: int = 0


class Metrics:
    """Writes events and log lines; safe to call from any thread.

    ``devices`` maps the label of each device of the run to the device ("drafter:6": cuda:5).
    ``experiments`` are marked in every step and at the end. ``clock``: seconds.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        devices: Mapping[str, torch.device],
        *,
        experiments: Sequence[str] = (),
        console: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = EventWriter(path, run_id)
        self._clock = clock
        self._marks = {"experiments": list(experiments)} if experiments else {}
        self._devices = devices
        self._console = console or sys.stdout
        self._lock = threading.RLock()
        self._closed, self._num_lost = False, 0
        self._num_steps, self._log_every = 0, 1
        self._window: deque[tuple[float, int, Totals]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._last_flow = Flow(0, 0.0, 0.0)
        self._throughput, self._fell = Throughput(), False
        self._flows: deque[tuple[float, Flow]] = deque()  # of the last RECENT_S
        self.totals = Totals()

    def begin(self, step: int, num_steps: int, log_every: int, totals: Totals) -> None:
        """Start the clock of the training phase, after ``step`` steps of ``num_steps``."""
        with self._lock:
            self._num_steps, self._log_every, self.totals = num_steps, log_every, totals
            self._window.clear()
            self._window.append((self._clock(), step, totals))
            self._throughput.begin()
            self._throughput.note(self._clock(), totals.tokens)

    def phase(self, phase: str, **facts: Any) -> None:
        """Tell that a phase begins: load, data, warmup, train, checkpoint, export, ..."""
        told = "".join(f" {key} {value}" for key, value in facts.items())
        self._tell("phase", f"{phase}{told}", phase=phase, **facts)

    def step(self, figures: StepFigures, flow: Flow) -> None:
        """Count a step; every ``log_every`` steps and at the end it is told."""
        with self._lock:
            self.totals = Totals(
                self.totals.tokens + figures.num_tokens, self.totals.anchors + figures.num_anchors
            )
            self._window.append((self._clock(), figures.step, self.totals))
            self._watch_throughput(flow)
            if figures.step % self._log_every and figures.step != self._num_steps:
                return
            values = self._step_values(figures, flow)
            self._last_flow = flow
            own = "".join(f" {key} {value:.3g}" for key, value in figures.variant.items())
            self._tell("step", _step_line(values) + own, **values, **self._marks)

    def started(self, step: int, **facts: Any) -> None:
        """Tell that the first step of this process is done: start_s, num_compiles, compile_s."""
        told = "".join(f" {key} {value}" for key, value in facts.items())
        self._tell("started", f"first step {step} is done:{told}", step=step, **facts)

    def compile(self, **facts: Any) -> None:
        """Tell of a compile: thread, device, key, compile_s, num_graphs, reasons, expected."""
        line = f"compiled {facts['num_graphs']} graphs for {facts['key']} on {facts['thread']}"
        late = " AFTER THE WARM-UP" if facts.get("sealed") else ""
        why = f": {facts['reasons'][0]}" if facts.get("reasons") else ""
        self._tell("compile", f"{line} in {facts['compile_s']:.1f} s{late}{why}", **facts)

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Tell of a complete checkpoint."""
        size = sum(entry.stat().st_size for entry in path.iterdir())
        with self._lock:
            self._throughput.pause(seconds)
        self._tell(
            "checkpoint",
            f"checkpoint {path.name} ({size / _MIB:.1f} MiB) in {seconds:.1f} s",
            step=step,
            path=path.name,
            checkpoint_s=round(seconds, 3),
            size_bytes=size,
        )

    def evaluation(self, values: Mapping[str, Any]) -> None:
        """Tell of an evaluation in training, and leave its seconds out of the rates and the ETA."""
        with self._lock:
            pause_s = values["evaluation_s"]
            self._throughput.pause(pause_s)
            self._window = deque(
                ((began + pause_s, step, totals) for began, step, totals in self._window),
                maxlen=self._window.maxlen,
            )
            self._tell("eval", _evaluation_line(values), **values)

    def warning(self, text: str, **facts: Any) -> None:
        """Tell of something that does not end the run; the whole text goes to the log.

        ``facts``: of a target thread that is left out or back: thread, device, state, age_s.
        """
        first = text.splitlines()[0] if text else ""
        self._tell("warning", f"warning: {text}", text=first, **facts)

    def finished(self, state: str, step: int, error: str | None = None) -> None:
        """Tell how the training ended: finished, stopped or failed."""
        line = f"{state} after step {step}"
        self._tell("finished", line, state=state, step=step, error=error, **self._marks)

    def note(self, text: str) -> None:
        """Write a line to the log alone."""
        with self._lock:
            self._print(text)

    def close(self) -> None:
        """Sync the events; what is told afterwards goes to the log alone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._writer.close()
                except OSError as error:
                    self._print(f"warning: metrics.jsonl could not be closed: {error}")

    def _tell(self, kind: str, line: str, **values: Any) -> None:
        with self._lock:
            if not self._closed:
                self._write(kind, values)
            self._print(line)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write an event; those that a full disk refuses are counted, and told when there is room.

        The weights since the last checkpoint are worth more than the events.
        """
        try:
            if self._num_lost:
                text = f"{self._num_lost} events before this one could not be written"
                self._writer.write("warning", text=text)
                self._num_lost = 0
            self._writer.write(kind, **values)
        except OSError as error:
            if not self._num_lost:
                self._print(f"warning: metrics.jsonl cannot be written, the run goes on: {error}")
            self._num_lost += 1

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # there is nobody left to tell
            self._console.write(line + "\n")
            self._console.flush()

    def _watch_throughput(self, flow: Flow) -> None:
        """Warn once when the run has become slow, with who waited for whom."""
        now, flows = self._clock(), self._flows
        flows.append((now, flow))
        while flows[0][0] < now - RECENT_S:
            flows.popleft()
        self._throughput.note(now, self.totals.tokens)
        fall, fell = self._throughput.fall, self._fell
        self._fell = fall is not None
        if fall is None or fell:
            return
        since, first = flows[0]
        room_s = flow.target_wait_s - first.target_wait_s
        batch_s = flow.drafter_wait_s - first.drafter_wait_s
        self.warning(
            f"throughput fell to {fall}; in the last {now - since:.0f} s target threads waited"
            f" {room_s:.1f} s for room, drafters {batch_s:.1f} s for batches"
        )

    def _step_values(self, figures: StepFigures, flow: Flow) -> dict[str, Any]:
        (began, first_step, first), (now, _, totals) = self._window[0], self._window[-1]
        seconds = max(now - began, 1e-9)
        per_step_s = seconds / max(1, figures.step - first_step)
        last = self._last_flow
        memory = {name: Memory.of(device) for name, device in self._devices.items()}
        return {
            "step": figures.step,
            "num_steps": self._num_steps,
            "epoch": figures.epoch,
            "loss": figures.loss,
            "lr": figures.lr,
            "grad_norm": figures.grad_norm,
            "slot_accuracy": figures.slot_accuracy,
            "expected_accepted": figures.expected_accepted,
            "tokens_total": totals.tokens,
            "anchors_total": totals.anchors,
            "tokens_per_s": (totals.tokens - first.tokens) / seconds,
            "anchors_per_s": (totals.anchors - first.anchors) / seconds,
            "q_hs": flow.q_hs,
            "q_hs_bytes": flow.q_hs_bytes,
            "target_wait_s": round(flow.target_wait_s - last.target_wait_s, 4),
            "drafter_wait_s": round(flow.drafter_wait_s - last.drafter_wait_s, 4),
            "step_s": round(figures.step_s, 4),
            "memory_bytes": {name: one.used for name, one in memory.items()},
            "peak_memory_bytes": {name: one.peak for name, one in memory.items()},
            "reserved_bytes": {name: one.reserved for name, one in memory.items()},
            "peak_reserved_bytes": {name: one.peak_reserved for name, one in memory.items()},
            "eta_s": round(per_step_s * (self._num_steps - figures.step), 1),
        } | dict(figures.variant)


class SampleLog:
    """samples.jsonl: for each step the batches that were trained on, and their samples.

    A resumed run writes the steps after its checkpoint again: of two lines of a step the later
    counts. A line that a kill or a full disk cut is closed with a newline before the next.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "samples.jsonl"
        self._torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, batches: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Append the batches of a step, each (index, epoch, sample ids), in one write.

        Raises: OSError when the disk is full.
        """
        told = json.dumps({"step": step, "batches": batches}, separators=(",", ":"))
        line = b"\n" * self._torn + told.encode() + b"\n"
        self._torn = True
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "a line was cut: no space left for samples.jsonl")
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: what tensors hold and what the allocator has taken, now and at most.

    On the CPU both are the resident memory of this process.
    """

    used: int
    peak: int
    reserved: int
    peak_reserved: int

    @classmethod
    def of(cls, device: torch.device) -> "Memory":
        """Read the allocator's counters of a GPU, or those of this process."""
        if device.type == "cuda":
            found = torch.cuda.memory_stats(device)
            kinds = ("allocated_bytes", "reserved_bytes")
            pairs = [found.get(f"{k}.all.{when}", 0) for k in kinds for when in ("current", "peak")]
            return cls(*pairs)
        used = _status_bytes("VmRSS")
        # The kernel's two counters are updated apart; a peak is never below the present.
        peak = max(used, _status_bytes("VmHWM"))
        return cls(used, peak, used, peak)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _evaluation_line(values: Mapping[str, Any]) -> str:
    def of(measured: Mapping[str, Any]) -> str:
        low, high = measured["acceptance_length_interval"]
        return f"{measured['acceptance_length']:.3f} ({low:.3f} to {high:.3f})"

    parts = [f"acceptance length {of(values)} on {values['num_prompts']} prompts"]
    datasets = values["datasets"]
    if len(datasets) > 1:
        parts += [f"{name} {of(measured)}" for name, measured in datasets.items()]
    if values.get("ema"):
        parts.append(f"ema {of(values['ema'])}")
    if values.get("best_step") is not None:
        best = f"{values['best_acceptance_length']:.3f} at step {values['best_step']}"
        parts.append(f"best {best} ({values['best_weights']})")
    return f"eval step {values['step']} {', '.join(parts)}"


def _step_line(values: Mapping[str, Any]) -> str:
    eta = round(values["eta_s"])
    clock = f"{eta // 3600}h{eta // 60 % 60:02}m" if eta >= 3600 else f"{eta // 60}m{eta % 60:02}s"
    return (
        f"step {values['step']}/{values['num_steps']} loss {values['loss']:.4f}"
        f" lr {values['lr']:.2e} grad {values['grad_norm']:.2f}"
        f" expected {1 + values['expected_accepted']:.2f}"
        f" tok/s {values['tokens_per_s']:.0f} anchors/s {values['anchors_per_s']:.0f}"
        f" q_hs {values['q_hs']} eta {clock}"
    )
