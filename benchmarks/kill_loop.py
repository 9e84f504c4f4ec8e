"""Kill -9 again and again, resume each time, and end with the weights of a run never killed.

    python -m benchmarks.kill_loop --directory DIR [--kills 50] [--seed 0] [--drafters 2]

Trains a tiny random target on the CPU twice as ``python -m trainer train``: once undisturbed, once
with SIGKILLs at seeded random moments: while it starts, between steps, inside the writing of a
checkpoint, inside an evaluation. Prints a line a kill, then what both runs came to: the digest of
weights, optimiser state and average, and the multiset of samples that the steps really trained on.
The status is 0 when they are equal.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.whole_run import MASK_TOKEN_ID, build_target, gpus, manifest_of, write_chats
from trainer import checkpoint
from trainer.contract.completion import PARTIAL_SUFFIX, step_directory
from trainer.contract.config import TrainConfig
from trainer.contract.evaluations import Evaluations

MOMENTS = {"start": 10, "step": 45, "checkpoint": 30, "evaluate": 15}  # shares in per cent
_START_S = 4.0  # imports and loading take about this long
_MOST_STEPS = 12
_STEPS_PER_KILL = 12


@dataclass(frozen=True)
class Kill:
    """One life of the trainer and its end.

    moment: what it was to be killed in. began, ended: the steps it went on from and told last.
    left: what stood half written in checkpoints/. is_late: it had finished before.
    """

    moment: str
    began: int
    ended: int
    left: str
    is_late: bool


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to; ``visits`` counts (epoch, sample) by what was trained on."""

    digest: str
    trained: checkpoint.Trained
    visits: Counter[tuple[int, int]]
    evaluations: dict[int, Any]


def start(run_dir: Path, *, resume: bool) -> "subprocess.Popen[str]":
    """Start the real trainer."""
    arguments = ["train", "--run-dir", str(run_dir), *(["--resume"] if resume else [])]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(run_dir: Path, *, resume: bool) -> None:
    """Let the trainer run to its end. Raises: RuntimeError with its last lines when it failed."""
    process = start(run_dir, resume=resume)
    told, _ = process.communicate()
    if process.returncode:
        raise RuntimeError("\n".join(told.splitlines()[-15:]))


def kill_once(run_dir: Path, moment: str, draw: random.Random, *, resume: bool) -> Kill:
    """Start the trainer and kill it at a moment of this kind.

    Raises: RuntimeError with its last lines when it failed by itself.
    """
    process = start(run_dir, resume=resume)
    assert process.stdout is not None  # noqa: S101 - asked for above
    lines: list[str] = []
    if moment == "start":
        time.sleep(draw.uniform(0.0, _START_S))
    else:
        _read_until(process.stdout, lines, moment, draw)
        if moment == "checkpoint":
            _wait_for_partial(run_dir, process)
            time.sleep(draw.uniform(0.0, 0.01))
        else:
            time.sleep(draw.uniform(0.0, 0.03))
    process.send_signal(signal.SIGKILL)
    lines += process.communicate()[0].splitlines()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError("\n".join(["it ended by itself:", *lines[-15:]]))
    left = sorted(p.name for p in (run_dir / "checkpoints").glob(f"*{PARTIAL_SUFFIX}"))
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if _is_step(line)]
    began = [int(line.split()[2]) for line in lines if line.startswith("resume step ")]
    return Kill(
        moment=moment,
        began=began[-1] if began else 0,
        ended=steps[-1] if steps else 0,
        left=" ".join(left),
        is_late=process.returncode == 0,
    )


def _read_until(stream: Any, lines: list[str], moment: str, draw: random.Random) -> None:
    """Read the log up to the step after which the moment is waited for, or the moment itself."""
    wanted = draw.randint(1, _MOST_STEPS)
    seen = 0
    for line in stream:
        lines.append(line)
        seen += _is_step(line)
        if seen >= wanted and (moment != "evaluate" or line.startswith("evaluate step ")):
            return


def _wait_for_partial(run_dir: Path, process: "subprocess.Popen[str]") -> None:
    """Wait for a checkpoint being written, at most a second: a busy machine may miss some."""
    give_up = time.monotonic() + 1.0
    while process.poll() is None and time.monotonic() < give_up:
        if any((run_dir / "checkpoints").glob(f"*{PARTIAL_SUFFIX}")):
            return
        time.sleep(0.0005)


def _is_step(line: str) -> bool:
    return line.startswith("step ")


def kill_and_finish(run_dir: Path, moments: Sequence[str], draw: random.Random) -> list[Kill]:
    """Kill the run once at each of ``moments``, resume after each, and let it finish at last."""
    kills = []
    for number, moment in enumerate(moments):
        kills.append(kill_once(run_dir, moment, draw, resume=number > 0))
        show(number + 1, kills[-1])
    finish(run_dir, resume=True)
    return kills


def outcome(run_dir: Path, num_steps: int) -> Outcome:
    """Read what a finished run came to."""
    state = checkpoint.load(run_dir / "checkpoints" / step_directory(num_steps))
    digest = hashlib.sha256()
    for part in (state.masters, state.optimizer, state.average):
        for name, tensor in sorted(part.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    by_step: dict[int, list[Any]] = {}  # of a step that was done twice the later line counts
    for line in (run_dir / "samples.jsonl").read_bytes().split(b"\n"):
        try:
            told = json.loads(line)
            by_step[told["step"]] = told["batches"]
        except ValueError:
            continue  # cut by a kill
    visits = Counter(
        (epoch, sample)
        for batches in by_step.values()
        for _index, epoch, samples in batches
        for sample in samples
    )
    entries = Evaluations.read(run_dir).entries
    for entry in entries.values():
        del entry["evaluation_s"]
    return Outcome(digest.hexdigest(), state.trained, visits, entries)


def show(number: int, kill: Kill) -> None:
    """Print one line of the table."""
    span = f"{kill.began:>5} -> {kill.ended:<5}"
    late = "  (it had finished)" if kill.is_late else ""
    print(f"{number:>4}  {kill.moment:<10}  {span}  {kill.left}{late}", flush=True)


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Write target and chats; return the settings of both runs."""
    root: Path = options.directory
    root.mkdir(parents=True, exist_ok=True)
    build_target(root / "target", "tiny", "cpu")
    write_chats(root / "chats.jsonl", 200, 32)
    write_chats(root / "heldout.jsonl", 4, 16)
    return {
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {
            "path": str(root / "chats.jsonl"),
            "max_length": 64,
            "token_budget": 128,
            "max_anchors": 8,
        },
        "draft": {
            "num_draft_layers": 1,
            "block_size": 4,
            "num_taps": 3,
            "mask_token_id": MASK_TOKEN_ID,
            "dtype": "float32",
        },
        "loss": {"position_decay": 3.0},
        "optim": {
            "name": "muon",
            "max_steps": options.kills * _STEPS_PER_KILL,
            "epochs": 1000.0,
            "ema_decay": 0.99,
            "grad_accumulation": options.accumulation,
        },
        "evaluation": {
            "every_steps": 10,
            "prompts": str(root / "heldout.jsonl"),
            "num_prompts": 2,
            "max_new_tokens": 8,
        },
        "run": {
            "device": "cpu",
            "cpu_threads": 1,
            "checkpoint_every_steps": 3,
            "keep_checkpoints": 2,
            "export_at_end": False,
            "log_samples": True,
        },
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", type=int, default=1)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Run both and compare."""
    options, began = parse(), time.monotonic()
    settings = prepare(options)
    draw = random.Random(options.seed)
    runs = []
    for tag in ("straight", "killed"):
        config = TrainConfig.from_dict(settings)
        run_dir = options.directory / "runs" / tag
        run_dir.mkdir(parents=True)
        cards = gpus("cpu", options.targets, options.drafters)
        manifest = manifest_of(run_dir, config, cards)
        (run_dir / "manifest.json").write_text(manifest.to_json())
        runs.append(run_dir)
    finish(runs[0], resume=False)
    print("kill  in          from -> to      left half written", flush=True)
    moments = draw.choices(list(MOMENTS), list(MOMENTS.values()), k=options.kills)
    kill_and_finish(runs[1], moments, draw)
    num_steps = settings["optim"]["max_steps"]
    straight, killed = (outcome(run_dir, num_steps) for run_dir in runs)
    for name, one in (("straight", straight), ("killed", killed)):
        samples = f"{one.visits.total()} visits of samples, hash {one.trained.samples_hash:016x}"
        print(f"{name:>8}  {num_steps} steps  sha256 {one.digest[:16]}  {samples}")
    print(f"{options.kills} kills in {time.monotonic() - began:.0f} s: {Counter(moments)}")
    print("equal" if straight == killed else "DIFFERENT")
    return 0 if straight == killed else 1


if __name__ == "__main__":
    sys.exit(main())
