"""Seconds from the start of a process to its first step: cold, after a warm-up, and by artefacts.

    python -m benchmarks.first_step --directory DIR [--device cuda] [--size small]

Makes a random target and chats as whole_run does. ``cold`` trains a few steps with empty caches
while, beside it, ``warmup --save-artifacts`` fills others; ``warm`` trains in a new process with
those; ``artefacts`` is a warm-up that begins with the file in empty caches. Prints a table and a
JSON line; status 1 when a run compiled after its warm-up, or the warm ones missed the caches.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import whole_run
from trainer.contract.manifest import Manifest

_STEPS = 6


class Starts:
    """The runs of one directory, each with a tag and caches of its own choice."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        options.directory.mkdir(parents=True, exist_ok=True)
        whole_run.build_target(options.directory / "target", options.size, options.device)
        chats: Path = options.directory / "chats.jsonl"
        whole_run.write_chats(chats, 256, options.longest)

    def run_dir(self, tag: str, caches: str) -> Path:
        """Make a run directory whose caches are those of the name."""
        fields = vars(self._options) | {"tag": tag, "steps": _STEPS, "targets": 1}
        run_dir = whole_run.write_manifest(argparse.Namespace(**fields))
        path = run_dir / "manifest.json"
        manifest = Manifest.from_json(path.read_text())
        where = str(self._options.directory / "caches" / caches)
        path.write_text(replace(manifest, cache_dir=where).to_json())
        return run_dir

    def take(self, run_dir: Path, command: str, *options: str) -> None:
        """Run one command of the trainer; raises RuntimeError when it fails."""
        arguments = [command, "--run-dir", str(run_dir), *options]
        if whole_run.stage(command, run_dir, arguments, self._options.limit_s):
            raise RuntimeError(f"{command} of {run_dir.name} failed; see {run_dir}")

    def train(self, tag: str, caches: str) -> dict[str, Any]:
        """Train a few steps; returns what the events say of the start."""
        run_dir = self.run_dir(tag, caches)
        self.take(run_dir, "train")
        text = (run_dir / "metrics.jsonl").read_text()
        return {"start": tag} | start_of([json.loads(line) for line in text.splitlines()])

    def warm_up(self, tag: str, caches: str, *options: str) -> dict[str, Any]:
        """Warm up; returns what its reports say."""
        run_dir = self.run_dir(tag, caches)
        self.take(run_dir, "warmup", *options)
        lines = (run_dir / "warmup.log").read_text().splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{")]
        cache: Counter[str] = Counter()
        for report in told:
            cache.update(report.get("cache", {}))
        done = told[-1]
        return {
            "start": tag,
            "seconds": done["total_s"],
            "num_compiles": done["num_compiles"],
            "cache": dict(cache),
        }


def start_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds to the first step, compiles before it and after the warm-up, cache hits."""
    (started,) = [event for event in events if event["kind"] == "started"]
    compiles = [event for event in events if event["kind"] == "compile"]
    cache: Counter[str] = Counter()
    for event in compiles:
        cache.update(event["cache"])
    return {
        "seconds": started["start_s"],
        "compile_s": started["compile_s"],
        "num_compiles": started["num_compiles"],
        "num_late": sum(event["sealed"] or not event["expected"] for event in compiles),
        "cache": dict(cache),
    }


def measure(starts: Starts, artefacts: Path, *, compiles: bool) -> list[dict[str, Any]]:
    """Take all starts; those that need nothing of each other side by side."""
    keep = ["--save-artifacts", str(artefacts)] if compiles else []

    def filled() -> list[dict[str, Any]]:
        rows = [starts.warm_up("warmup", "b", *keep), starts.train("warm", "b")]
        if compiles:
            rows.append(starts.warm_up("artefacts", "c", "--load-artifacts", str(artefacts)))
        return rows

    def cold() -> list[dict[str, Any]]:
        return [starts.train("cold", "a")]

    jobs: list[Callable[[], list[dict[str, Any]]]] = [cold, filled]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job) for job in jobs]
        return [row for one in running for row in one.result()]


def main() -> int:
    """Take the starts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", default="small", help="of the target, as in whole_run")
    for name, value in (("layers", 5), ("longest", 512), ("token-budget", 8192), ("anchors", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=240.0)
    options = parser.parse_args()
    compiles = options.device == "cuda"
    rows = measure(Starts(options), options.directory / "caches.bin", compiles=compiles)
    print("| start | seconds | compiling | graphs | after the warm-up | caches |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["start"], row["seconds"], row.get("compile_s", ""), row["num_compiles"]]
        cells += [row.get("num_late", ""), json.dumps(row["cache"])]
        print(f"| {' | '.join(map(str, cells))} |")
    print(json.dumps({"torch": torch.__version__, "starts": rows}))
    late = any(row.get("num_late") for row in rows)
    missed = any(row["cache"].get("fx_miss") for row in rows if row["start"] == "warm")
    return int(late or missed)


if __name__ == "__main__":
    sys.exit(main())
