"""Starts of three threads that compile changing shapes: through the gate, without, with a lock.

    python -m benchmarks.gate_stress --gate 200 --without-gate 20 --first-call-lock 20
        [--device cuda] [--seconds 480] [--limit 120] [--silence 60]

Each start is a process of its own that has compiled nothing: forked from one that has imported
torch and has run none of its threads. What it does is told in gate_starts. Counted are starts that
crash, hang (no step ends for ``--silence`` seconds, or ``--limit`` is over), raise, give wrong
numbers, or run a step silently without what was compiled. Prints a table, then one JSON line;
status 1 when the gate let anything through, or when a way without it failed nothing (then the test
saw nothing). With ``--device cuda`` threads take the GPUs in turn and inductor makes the kernels.
"""

import argparse
import faulthandler
import importlib
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gate_starts import WAYS, Tell, Work, start_here

_KINDS = ("crashed", "hung", "raised", "silent", "wrong")
_STACKS_S = 5.0
_TOLD_FRAMES = 4  # of each thread of a start that hung or crashed


@dataclass
class Outcome:
    """What one start came to, from the lines that it told while it lived."""

    way: str
    seed: int
    steps: int = 0
    raised: int = 0
    silent: int = 0
    wrong: int = 0
    crashed: int = 0
    hung: int = 0
    graphs: int = 0
    seconds: float = 0.0
    failed_after_s: float | None = None
    errors: Counter[str] = field(default_factory=Counter)
    compiles: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def take(self, told: dict[str, Any]) -> None:
        """Take one line."""
        self.steps += "thread" in told
        self.graphs += told.get("ended", 0)
        self.seconds = told.get("seconds", self.seconds)
        self.compiles += told.get("compiles", [])
        self.modules = told.get("modules", self.modules)
        self.raised += "raised" in told
        self.silent += bool(told.get("silent"))
        self.wrong += bool(told.get("wrong"))
        if "raised" in told:
            self.errors[told["raised"]] += 1
        self.errors.update(f"{kind} ran uncompiled" for kind in told.get("silent", ()))

    @property
    def kinds(self) -> list[str]:
        """The ways in which it failed."""
        return [kind for kind in _KINDS if getattr(self, kind)]

    def line(self) -> dict[str, Any]:
        """Return it for the record, without what it imported."""
        kept = {key: value for key, value in vars(self).items() if value and key != "modules"}
        return {"start": self.way} | kept


@dataclass
class Tally:
    """All starts of one way: how many failed, in which kinds, and what was said."""

    way: str
    starts: int = 0
    failed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    failed_steps: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def take(self, outcome: Outcome) -> None:
        """Add one start."""
        self.starts += 1
        self.failed += bool(outcome.kinds)
        self.kinds.update(outcome.kinds)
        self.steps += outcome.steps
        self.failed_steps.update({k: getattr(outcome, k) for k in ("raised", "silent", "wrong")})
        self.said.update(outcome.errors)
        self.seconds += outcome.seconds

    def row(self) -> str:
        """Return the line of the table."""
        raised, silent = (f"{self.kinds[k]} ({self.failed_steps[k]})" for k in ("raised", "silent"))
        cells = [WAYS[self.way], self.starts, self.failed, self.kinds["crashed"]]
        cells += [self.kinds["hung"], raised, silent, self.kinds["wrong"], self.steps]
        return f"| {' | '.join(str(cell) for cell in cells)} |"


HEAD = (
    "| way | starts | failed | crashed | hung | raised (steps) | silently not compiled (steps)"
    " | wrong numbers | steps |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Limits:
    """Seconds of a start, and of one without a step that ends."""

    limit_s: float
    silence_s: float


def fork_start(way: str, seed: int, start: Callable[[Tell], None], limits: Limits) -> Outcome:
    """Take one start in a forked process; a crash and a hang are outcomes too."""
    outcome, began = Outcome(way, seed), time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            os.close(reading)
            _be_start(start, writing, stderr)
        os.close(writing)
        try:
            for line in _lines(reading, began + limits.limit_s, limits.silence_s):
                outcome.take(json.loads(line))
                if outcome.kinds and outcome.failed_after_s is None:
                    outcome.failed_after_s = round(time.monotonic() - began, 2)
            ended = True
        except TimeoutError as error:
            outcome.hung, ended = 1, False
            outcome.errors[str(error)] += 1
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)  # it writes its stacks
                _wait_for_text(stderr)
        finally:
            os.close(reading)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with the helpers of its compiler
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if ended and not outcome.graphs:
        outcome.crashed = 1
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        outcome.errors[how] += 1
    if outcome.hung or outcome.crashed:
        outcome.stacks = stacks(said) or said.splitlines()[-8:]
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def _be_start(start: Callable[[Tell], None], writing: int, stderr: IO[bytes]) -> None:
    """Be the forked process; never returns."""
    status = 1
    try:
        os.setsid()
        os.dup2(stderr.fileno(), 2)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        # One write a line: lines of several threads do not mix.
        start(lambda told: _write(writing, told))
        status = 0
    except BaseException as error:  # noqa: BLE001 - a fork must not run on in its parent's code
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait_for_text(file: IO[bytes]) -> None:
    """Wait until the stacks are there; a process that cannot even write them has none."""
    gives_up = time.monotonic() + _STACKS_S
    while not os.fstat(file.fileno()).st_size and time.monotonic() < gives_up:
        time.sleep(0.05)
    time.sleep(0.2)  # for the rest of them


def _write(descriptor: int, told: dict[str, Any]) -> None:
    data = json.dumps(told).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _lines(descriptor: int, ends: float, silence_s: float) -> Iterator[bytes]:
    """Yield lines to the end. Raises: TimeoutError for a silence, and when the time is over."""
    rest = b""
    while True:
        left = min(ends - time.monotonic(), silence_s)
        if not select.select([descriptor], [], [], max(0.0, left))[0]:
            raise TimeoutError(f"no step ended for {max(left, 0.0):.0f} s")
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def stacks(said: str) -> list[str]:
    """Return the innermost frames of each thread out of what faulthandler wrote.

    Of a crash the thread that crashed is marked.
    """
    found = []
    for block in re.split(r"(?m)^(?=(?:Current t|T)hread 0x)", said)[1:]:
        frames = [line.strip() for line in block.splitlines()[1:] if line.startswith("  File")]
        short = [frame.replace(str(Path(torch.__file__).parent), "torch") for frame in frames]
        mark = "crashed in " if block.startswith("Current") and "Fatal" in said else ""
        found.append(mark + " < ".join(short[:_TOLD_FRAMES]))
    return found


def preload(work: Work, limits: Limits) -> None:
    """Import all that a start imports, so that 200 starts do not do it 200 times."""
    first = fork_start("gate", work.seed, partial(start_here, "gate", work), limits)
    for module in first.modules:
        with suppress(ImportError):
            importlib.import_module(module)


def campaign(options: argparse.Namespace, counts: dict[str, int]) -> list[Tally]:
    """Take the starts of all ways in mixed order, so that what else the machine does meets all."""
    tallies, ends = {name: Tally(name) for name in counts}, time.monotonic() + options.seconds
    starts = [(name, seed) for name, count in counts.items() for seed in range(count)]
    if options.device == "cpu":
        random.Random(0).shuffle(starts)
    limits = Limits(options.limit, options.silence)
    for number, (name, seed) in enumerate(starts):
        work = Work(options.threads, options.shapes, options.repeats, seed, options.device)
        if number == 0 and options.device == "cpu":
            preload(work, limits)
        if time.monotonic() > ends:
            break
        with tempfile.TemporaryDirectory() as cache:  # nothing on the disk is warm
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            outcome = fork_start(name, seed, partial(start_here, name, work), limits)
        tallies[name].take(outcome)
        print(json.dumps(outcome.line()), file=sys.stderr, flush=True)
    return list(tallies.values())


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in WAYS.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="STARTS", help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no start after so many")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a start")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a step")
    for name in ("threads", "shapes", "repeats"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Work, name))
    return parser.parse_args()


def main() -> int:
    """Take the starts and print what they saw."""
    options = parse()
    torch.set_num_threads(1)
    counts = {name: getattr(options, name.replace("-", "_")) for name in WAYS}
    chosen = {name: count for name, count in counts.items() if count} or {"gate": 200}
    tallies = campaign(options, chosen)
    print("\n".join((HEAD, *(tally.row() for tally in tallies))))
    print(json.dumps({"torch": torch.__version__, "ways": [vars(tally) for tally in tallies]}))
    good = all(bool(tally.failed) is (tally.way != "gate") for tally in tallies)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
