"""Prepares many chats, kills that twice, resumes it, and compares with a run that nobody killed.

    python -m benchmarks.prepare_kills --directory DIR --target DIR [--samples 200000] [--workers N]

DIR of the target needs its tokenizer alone. Every hundredth record is broken, in one of five ways.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one"
    " had by word but not what all were we when your can said there use an each which she do how"
    " their if will up other about out many then them these so some her would make like him into"
)


def write_chats(path: Path, count: int, seed: int = 0) -> list[int]:
    """Write chats of a few hundred tokens; returns the line numbers of the broken ones."""
    draw, words = random.Random(seed), _WORDS.split()
    broken: list[int] = []

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randrange(8, most)))

    with path.open("w") as stream:
        for number in range(1, count + 1):
            messages = [
                {"role": "user", "content": f"{number}: {text(40)}"},
                {"role": "assistant", "content": text(260)},
            ]
            line = json.dumps({"id": number, "messages": messages})
            if number % 100 == 50:
                broken.append(number)
                ways = (line[:-20], '{"text": 1}', "[]", line.replace("assistant", "user"), "\x00")
                line = ways[number // 100 % len(ways)]
            stream.write(line + "\n")
    return broken


@dataclass(frozen=True)
class Ran:
    """How a process ended.

    peak_rss_bytes: of its largest process, libraries included. peak_all_bytes: of all processes
    together, without what maps files, which they share.
    """

    status: int
    wall_s: float
    peak_rss_bytes: int
    peak_all_bytes: int


def run_prepare(arguments: list[str], output: Path, kill_when: Callable[[], bool]) -> Ran:
    """Run ``trainer prepare``; SIGKILL it when ``kill_when`` says so."""
    argv = [sys.executable, "-m", "trainer", "prepare", "--output", str(output), *arguments]
    began = time.monotonic()
    process = subprocess.Popen(argv)
    peak_one = peak_all = 0
    while process.poll() is None:
        family = list(_family(process.pid))
        peak_one = max(peak_one, *(_status_bytes(pid, "VmHWM") for pid in family))
        peak_all = max(peak_all, sum(_status_bytes(pid, "RssAnon") for pid in family))
        if kill_when():
            process.send_signal(signal.SIGKILL)
        time.sleep(_POLL_S)
    return Ran(process.returncode, time.monotonic() - began, peak_one, peak_all)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _status_bytes(pid: int, key: str) -> int:
    """Return one of the sizes of /proc/PID/status; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def digest_directory(directory: Path) -> str:
    """Return one digest over the shards of a prepared directory, byte for byte."""
    state = hashlib.sha256()
    for path in sorted(directory.glob("shard-*")):
        state.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def main() -> int:
    """Run the whole comparison; returns 0 when every digest agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    chats = args.directory / "chats.jsonl"
    broken = write_chats(chats, args.samples)
    whole, killed = args.directory / "whole", args.directory / "killed"
    for old in (whole, killed):
        shutil.rmtree(old, ignore_errors=True)
    shared = ["--input", str(chats), "--target", str(args.target)]
    shared += ["--num-workers", str(args.workers)]
    runs = {"uninterrupted": run_prepare(shared, whole, lambda: False)}
    num_shards = len(list(whole.glob("shard-*.ids.bin")))
    for share in (1, 2):
        wanted = num_shards * share // 3

        def far_enough(wanted: int = wanted) -> bool:
            return len(list(killed.glob(".work/shard-?????.json"))) >= wanted

        runs[f"killed at {share}/3"] = run_prepare(shared, killed, far_enough)
    runs["resumed to the end"] = run_prepare(shared, killed, lambda: False)
    return _tell(runs, (whole, killed), chats, broken)


def _tell(
    runs: dict[str, Ran], directories: tuple[Path, Path], chats: Path, broken: list[int]
) -> int:
    print(f"{chats.stat().st_size / 1e6:,.0f} MB of chats, {len(broken):,} broken\n")
    print("| run | status | seconds | peak RSS, largest process | all, private |")
    print("|---|---|---|---|---|")
    for name, ran in runs.items():
        one, together = ran.peak_rss_bytes / 2**20, ran.peak_all_bytes / 2**20
        print(f"| {name} | {ran.status} | {ran.wall_s:.0f} | {one:.0f} MiB | {together:.0f} MiB |")
    documents = [json.loads((path / "dataset.json").read_text()) for path in directories]
    totals = documents[0]["content"]["totals"]
    print(f"\n{totals['num_samples']:,} samples, {totals['num_tokens']:,} tokens")
    same = documents[0]["sha256"] == documents[1]["sha256"]
    bytes_same = digest_directory(directories[0]) == digest_directory(directories[1])
    lines = (directories[1] / "bad.jsonl").read_text().splitlines()
    listed = [json.loads(line)["number"] for line in lines] == broken
    print(f"digests equal: {same} ({documents[0]['sha256'][:16]}); every byte equal: {bytes_same}")
    print(f"broken records listed by line: {listed} ({len(lines):,})")
    return 0 if same and bytes_same and listed else 1


if __name__ == "__main__":
    sys.exit(main())
