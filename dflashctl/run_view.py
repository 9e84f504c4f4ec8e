"""What a watcher knows of a run, built item by item: figures, log lines, alerts. Pure, no clock.

Times given as ``mono_s`` come from the watcher's own monotonic clock; times of events come from the
container's clock, which heartbeats carry, so a wrong clock on either side changes no age.
"""

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dflashctl.event_stream import Ended, Heartbeat, Item, LogBytes, Notice, RunEvent
from dflashctl.log_lines import LineAssembler
from trainer.contract.throughput import Throughput

NUM_LOG_LINES = 200
STALL_AFTER_S = 60.0  # and at least STALL_STEPS times the usual step
STALL_STEPS = 10
QUIET_PHASE_AFTER_S = 900.0  # loading and compiling say nothing for minutes


@dataclass(frozen=True)
class Alert:
    """Something that a person should look at.

    kind: non-finite, strayed, compile, targets, gpus, link, stall or throughput.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Device:
    """Memory of one GPU (or of the process, on a CPU)."""

    name: str
    memory_bytes: float | None
    peak_bytes: float | None


@dataclass
class RunView:
    """The present picture of one run. ``update`` changes it; readers only look."""

    tag: str
    place: str
    phase: str = ""
    process: str = ""
    step: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    num_compiles: int = 0
    compile_s: float = 0.0
    num_late_compiles: int = 0  # after the warm-up, or outside the gate's exclusive side
    late_compile: str = ""
    experiments: list[str] = field(default_factory=list)
    num_non_finite: int = 0
    non_finite_step: int | None = None
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    log: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LOG_LINES))
    link: str = ""  # why there is no link, or ""
    gpus_lost: str = ""  # what the container's nvidia-smi said instead of GPUs, or ""
    strayed: str = ""  # which GPUs it holds that are not its own, or ""
    targets_out: dict[str, dict[str, Any]] = field(default_factory=dict)  # the event of each thread
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    ended: Ended | None = None
    _rates: Throughput = field(default_factory=Throughput)
    _lines: LineAssembler = field(default_factory=LineAssembler)
    _event_unix_s: float | None = None
    _beat_unix_s: float | None = None
    _beat_mono_s: float = 0.0

    def update(self, item: Item, mono_s: float) -> None:
        """Take one item of the stream, which arrived at ``mono_s``."""
        if isinstance(item, LogBytes):
            self.log.extend(self._lines.feed(item.data))
        elif isinstance(item, RunEvent):
            self._take_event(item.event)
        elif isinstance(item, Heartbeat):
            self.process, self.link, self.gpus_lost = item.process, "", item.gpus_lost
            self._beat_unix_s, self._beat_mono_s = item.now_unix_s, mono_s
        elif isinstance(item, Notice):
            self._take_notice(item)
        else:
            self.ended = item

    @property
    def log_tail(self) -> list[str]:
        """The last lines of the log, with the unfinished one at the end."""
        partial = self._lines.partial
        return [*self.log, partial] if partial else list(self.log)

    @property
    def devices(self) -> list[Device]:
        """Memory per GPU, in the order of the trainer."""
        used, peak = self.step.get("memory_bytes"), self.step.get("peak_memory_bytes")
        names = list(dict.fromkeys([*_by_device(used), *_by_device(peak)]))
        return [Device(n, _by_device(used).get(n), _by_device(peak).get(n)) for n in names]

    def age_s(self, mono_s: float) -> float | None:
        """Seconds since the last event happened, by the container's clock; None before one."""
        if self._event_unix_s is None or self._beat_unix_s is None:
            return None
        now_unix_s = self._beat_unix_s + (mono_s - self._beat_mono_s)
        return max(0.0, now_unix_s - self._event_unix_s)

    def alerts(self, mono_s: float) -> list[Alert]:
        """What is wrong now, the gravest first; nothing once the run has ended."""
        if self.ended is not None:
            return []
        now = (self._gpus(), self._link(), self._stall(mono_s), self._throughput())
        targets = self._targets(mono_s)
        found = [self._non_finite(), self._strayed(), self._late_compiles(), targets, *now]
        return [alert for alert in found if alert is not None]

    def _take_event(self, event: dict[str, Any]) -> None:
        self._event_unix_s = _number(event.get("t_unix_s")) or 0.0
        kind = event["kind"]
        if kind == "step":
            self._take_step(event)
        elif kind == "phase":
            self.phase = str(event.get("phase", ""))
            if self.phase == "data":  # a new process
                self._rates.begin()
                self.targets_out.clear()
        elif kind == "compile":
            self._take_compile(event)
        elif kind == "warning":
            self.warnings.append(str(event.get("text", "")))
            self._take_thread(event)
        elif kind == "checkpoint":
            self.checkpoint = event
            self._rates.pause(_number(event.get("checkpoint_s")) or 0.0)
        elif kind == "eval":
            self.evaluation = event
            self._rates.pause(_number(event.get("evaluation_s")) or 0.0)

    def _take_compile(self, event: dict[str, Any]) -> None:
        self.num_compiles += 1
        self.compile_s += _number(event.get("compile_s")) or 0.0
        if event.get("sealed") or event.get("expected") is False or event.get("fallback"):
            self.num_late_compiles += 1
            reasons = _texts(event.get("reasons")) or ["a shape that the warm-up did not have"]
            what = "ran uncompiled" if event.get("fallback") else reasons[0]
            self.late_compile = f"{event.get('thread')} for {event.get('key')}: {what}"

    def _take_thread(self, event: dict[str, Any]) -> None:
        """Note a target thread that is left out of the run, or back."""
        thread, state = str(event.get("thread", "")), event.get("state")
        if state == "back":
            self.targets_out.pop(thread, None)
        elif thread and state in ("stuck", "failed"):
            self.targets_out[thread] = event

    def _take_step(self, event: dict[str, Any]) -> None:
        self.step = event
        self.experiments = _texts(event.get("experiments"))
        loss = _number(event.get("loss"))
        if loss is None:
            self.num_non_finite += 1
            self.non_finite_step = event.get("step")
        else:
            self.losses.append(loss)
        if (step_s := _number(event.get("step_s"))) is not None:
            self.step_seconds.append(step_s)
        # Not tokens_per_s, which is a mean over many steps and falls minutes later.
        at_s, tokens = _number(event.get("t_unix_s")), _number(event.get("tokens_total"))
        if at_s is not None and tokens is not None:
            self._rates.note(at_s, tokens)

    def _take_notice(self, notice: Notice) -> None:
        if notice.kind == "disconnected":
            self.link = notice.text
            return
        if notice.kind == "connected":
            self.link = ""
        elif notice.kind == "strayed":
            self.strayed = notice.text
            return
        else:
            self._lines.restart()
        self.notes.append(notice.text)

    def _non_finite(self) -> Alert | None:
        if not self.num_non_finite:
            return None
        text = f"loss was not finite in {self.num_non_finite} step events"
        return Alert("non-finite", f"{text}, last at step {self.non_finite_step}")

    def _strayed(self) -> Alert | None:
        return (
            Alert("strayed", f"{self.strayed}; dflashctl stop {self.tag}") if self.strayed else None
        )

    def _late_compiles(self) -> Alert | None:
        if not self.num_late_compiles:
            return None
        times = "once" if self.num_late_compiles == 1 else f"{self.num_late_compiles} times"
        return Alert("compile", f"compiled {times} after the warm-up, last {self.late_compile}")

    def _targets(self, mono_s: float) -> Alert | None:
        if not self.targets_out:
            return None
        now_unix_s = (self._event_unix_s or 0.0) + (self.age_s(mono_s) or 0.0)
        told = []
        for thread, event in self.targets_out.items():
            how = "failed and is left out"
            if event["state"] == "stuck":
                before_s, at_s = (_number(event.get(key)) or 0.0 for key in ("age_s", "t_unix_s"))
                how = f"has made no progress for {before_s + now_unix_s - at_s:.0f} s"
            told.append(f"{thread} on {event.get('device')} {how}")
        return Alert("targets", f"{'; '.join(told)}; look at the GPU: dflashctl gpus")

    def _gpus(self) -> Alert | None:
        if not self.gpus_lost:
            return None
        vmid = self.place.rpartition("/")[2]
        then = "restart it" if vmid == "self" else f"pct reboot {vmid}"
        text = f"the container lost its GPUs (its nvidia-smi says: {self.gpus_lost}); {then}"
        return Alert("gpus", text)

    def _link(self) -> Alert | None:
        return Alert("link", self.link) if self.link else None

    def _stall(self, mono_s: float) -> Alert | None:
        age_s = self.age_s(mono_s)
        if age_s is None or self.process != "alive" or self.link:
            return None
        if self.phase not in ("", "train"):
            limit_s = QUIET_PHASE_AFTER_S
        else:
            usual_s = median(self.step_seconds) if self.step_seconds else 0.0
            limit_s = max(STALL_AFTER_S, STALL_STEPS * usual_s)
        if age_s <= limit_s:
            return None
        return Alert("stall", f"no event for {age_s:.0f} s (the process is alive)")

    def _throughput(self) -> Alert | None:
        fall = self._rates.fall
        return None if fall is None else Alert("throughput", str(fall))


def _number(value: Any) -> float | None:
    """Read a figure of an event; None for what is none, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


def _by_device(value: Any) -> dict[str, float | None]:
    """Read a figure that is told per device: a mapping, a list in order, or one number."""
    if isinstance(value, dict):
        return {str(name): _number(figure) for name, figure in value.items()}
    if isinstance(value, list):
        return {str(index): _number(figure) for index, figure in enumerate(value)}
    return {} if value is None else {"0": _number(value)}
