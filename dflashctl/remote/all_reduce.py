"""Lets two processes add numbers through torch.distributed, and tells how it ended.

argv[1]: {"python", "workspace", "requirements_digest", "backend": nccl or gloo, "devices": [uuid]
(none for gloo), "counts": [numbers of an all_reduce, the largest last], "limits": {stage: s},
"run_dir": what the ranks carry on their command line, by which the locks of their GPUs live}.
stdin: one JSON object, the environment of the place. Prints one JSON object with ``outcome`` ok,
wrong, hang or error. No rank is left behind: each ends by its own alarm where this program dies.

A rank is this same text with --rank N; it alone imports torch. It writes a line for each stage that
it enters, so that of a hang it is known which rank stands where.
"""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from dflashctl.remote.interpreter import chosen_python

NUM_RANKS = 2
NUM_TIMED = 5
PERIOD = 251  # a prime: a block that is shifted by a page or a tile shows
POLL_S = 0.05
AFTER_ERROR_S = 3.0  # the rank that failed first may tell its error after the other
KILL_S = 3.0
MAX_TEXT = 1500

Json = dict[str, Any]


# ---- a rank


def rank_main(order: Json, rank: int) -> None:
    """Import torch, join the other rank, and add; every stage is told before it begins."""
    signal.alarm(math.ceil(order["alarm_s"]))
    with Path(order["directory"], f"{rank}.told").open("a") as stream:

        def tell(stage: str, **facts: Any) -> None:
            line = {"stage": stage, "at_s": time.monotonic()} | facts  # one clock for both ranks
            stream.write(json.dumps(line) + "\n")
            stream.flush()

        try:
            reduce_all(order, rank, tell)
        except Exception as error:  # noqa: BLE001 - whatever torch raises is the answer
            tell("error", text=f"{type(error).__name__}: {error}"[-MAX_TEXT:])


def reduce_all(order: Json, rank: int, tell: Any) -> None:
    """Go through the stages of one rank."""
    tell("import")
    # By name: what the laptop imports of this package must not lead to torch.
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    tell("join")
    device = "cpu"
    if order["devices"]:
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        order["backend"],
        init_method=f"file://{order['directory']}/meeting",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=2 * order["alarm_s"]),  # the hang is told here, not by torch
    )
    for count in order["counts"]:
        tell("all_reduce", count=count)
        base = torch.arange(count, device=device) % PERIOD + 1
        numbers = (base * (rank + 1)).float()
        distributed.all_reduce(numbers)
        compare(numbers, base * sum(range(1, NUM_RANKS + 1)), tell)
    tell("timing", count=count)
    begun = time.perf_counter()
    for _ in range(NUM_TIMED):  # each doubles the sums: 251 * 3 * 2**5 is exact in float32
        distributed.all_reduce(numbers)
    numbers[0].item()  # waits for the device
    seconds = (time.perf_counter() - begun) / NUM_TIMED
    compare(numbers, base * (sum(range(1, NUM_RANKS + 1)) * NUM_RANKS**NUM_TIMED), tell)
    tell("leave", seconds=seconds, bytes=4 * count)
    distributed.destroy_process_group()
    tell("done")


def compare(numbers: Any, expected: Any, tell: Any) -> None:
    """Tell the first number that is not exactly what it must be; waits for the device."""
    differ = numbers != expected.float()
    num_wrong = int(differ.sum().item())
    if num_wrong:
        index = int(differ.int().argmax().item())
        found, right = numbers[index].item(), expected[index].item()
        facts = {"num_wrong": num_wrong, "index": index, "found": found, "expected": right}
        tell("wrong", count=numbers.numel(), **facts)


# ---- their parent


class Rank:
    """A rank as its parent sees it."""

    def __init__(self, number: int, argv: list[str], environment: dict[str, str]) -> None:
        self.number = number
        order = json.loads(argv[-1])
        self.told_path = Path(order["directory"], f"{number}.told")
        self.said_path = Path(order["directory"], f"{number}.said")
        self.told: list[Json] = []
        self.ended = False
        self.stage: Json = {"stage": "start"}
        self.since_s = time.monotonic()
        with self.said_path.open("wb") as said:
            self.process = subprocess.Popen(
                [*argv, "--rank", str(number), "--run-dir", order["run_dir"]],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    def look(self) -> None:
        """Read what it has told since; whether it has ended is asked before, not after."""
        self.ended = self.process.poll() is not None
        text = self.told_path.read_text() if self.told_path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        for line in lines[len(self.told) :]:
            if line["stage"] != "wrong":
                self.stage, self.since_s = line, time.monotonic()
        self.told = lines

    def all_told(self, stage: str) -> list[Json]:
        """Return the lines of one kind."""
        return [line for line in self.told if line["stage"] == stage]

    @property
    def done(self) -> bool:
        """Whether it went through all stages."""
        return bool(self.all_told("done"))

    def failed(self) -> bool:
        """Whether it told an error, or ended in silence."""
        return bool(self.all_told("error")) or (self.ended and not self.done)

    def late_s(self, limits: dict[str, float]) -> float:
        """Return for how long it stands in its stage beyond the limit; 0 when it does not."""
        if self.done or self.failed():
            return 0.0
        return max(0.0, time.monotonic() - self.since_s - limits[self.stage["stage"]])

    def standing(self) -> Json:
        """Return its stage, and for how long it stands there."""
        place = {key: self.stage[key] for key in ("stage", "count") if key in self.stage}
        return place | {"rank": self.number, "s": round(time.monotonic() - self.since_s, 1)}

    def error_at_s(self) -> float:
        """Return when it told its error; one that could not tell any is the cause."""
        return min((float(line["at_s"]) for line in self.all_told("error")), default=0.0)

    def error(self) -> str:
        """Return what it told of its end, else its last words."""
        for line in self.all_told("error"):
            return str(line["text"])
        said = self.said_path.read_text(errors="replace").strip()[-MAX_TEXT:].strip()
        rc = self.process.returncode
        how = f"ended by signal {-rc}" if rc < 0 else f"ended with status {rc}"
        return f"{how}: {said}" if said else how

    def end(self) -> bool:
        """Kill it; False when it stays, as a process stuck in the driver does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def watch(ranks: list[Rank], limits: dict[str, float]) -> None:
    """Wait until all are done, one failed, or one stands still for longer than its stage may."""
    while True:
        for rank in ranks:
            rank.look()
        if all(rank.done for rank in ranks) or any(rank.late_s(limits) for rank in ranks):
            return
        if any(rank.failed() for rank in ranks):
            limit = time.monotonic() + AFTER_ERROR_S
            while time.monotonic() < limit and not all(rank.failed() for rank in ranks):
                time.sleep(POLL_S)
                for rank in ranks:
                    rank.look()
            return
        time.sleep(POLL_S)


def verdict(ranks: list[Rank]) -> Json:
    """Say how it ended; wrong numbers come first, whatever came after them."""
    # Wrong numbers and the end of one rank bring those of the other about: the earliest counts.
    wrong = [(line["at_s"], rank, line) for rank in ranks for line in rank.all_told("wrong")]
    if wrong:
        _, rank, line = min(wrong, key=lambda one: one[0])
        return line | {"outcome": "wrong", "rank": rank.number}
    failed = [rank for rank in ranks if rank.failed()]
    if failed:
        first = min(failed, key=lambda rank: rank.error_at_s())
        return {"outcome": "error", "rank": first.number, "text": first.error()}
    if not all(rank.done for rank in ranks):
        waiting = sorted((rank for rank in ranks if not rank.done), key=lambda r: len(r.told))
        return {"outcome": "hang", "standing": [rank.standing() for rank in waiting]}
    (left,) = ranks[0].all_told("leave")
    slowest = max(rank.all_told("leave")[0]["seconds"] for rank in ranks)
    # Bus bandwidth of an all_reduce: 2 (n - 1) / n bytes cross the bus for each byte of the sum.
    bus = left["bytes"] * 2 * (NUM_RANKS - 1) / NUM_RANKS / slowest / 1e9
    return {"outcome": "ok", "bytes": left["bytes"], "bus_gb_per_s": bus}


def main(arguments: Json, extra: dict[str, str]) -> Json:
    """Run the ranks and tell how it ended."""
    text = sys.orig_argv[sys.orig_argv.index("-c") + 1]
    limits = arguments["limits"]
    environment = os.environ | extra | {"CUDA_VISIBLE_DEVICES": ",".join(arguments["devices"])}
    if arguments["backend"] == "gloo":  # both ranks are here; a host name may not resolve
        environment = {"GLOO_SOCKET_IFNAME": "lo"} | environment
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-ranks-") as directory:
        alarm_s = sum(limits.values()) + limits["all_reduce"] * len(arguments["counts"])
        order = {key: arguments[key] for key in ("backend", "devices", "counts", "run_dir")}
        order |= {"directory": directory, "alarm_s": alarm_s}
        argv = [chosen_python(arguments), "-c", text, json.dumps(order)]
        ranks: list[Rank] = []
        stuck: list[int] = []
        try:
            for number in range(NUM_RANKS):
                ranks.append(Rank(number, argv, environment))  # noqa: PERF401 - each is to be ended
            watch(ranks, limits)
            answer = verdict(ranks)
        except OSError as error:
            answer = {"outcome": "error", "rank": len(ranks), "text": f"{argv[0]}: {error}"}
        finally:
            stuck = [rank.process.pid for rank in ranks if not rank.end()]
    return answer | {"seconds": round(time.monotonic() - begun, 1), "stuck_pids": stuck}


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank_main(json.loads(sys.argv[1]), int(sys.argv[sys.argv.index("--rank") + 1]))
    else:
        print(json.dumps(main(json.loads(sys.argv[1]), json.loads(sys.stdin.read()))))
