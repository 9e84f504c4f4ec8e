"""A trainer without torch, for tests of everything around one: events, checkpoints, signals.

It takes the place of trainer/__main__.py in a copy of the package; contract and runner are the
real ones. Every step takes 20 ms; SIGINT and SIGTERM write a checkpoint and exit 10. Seed 12 has a
worker process that ignores every signal but SIGKILL, seed 13 ignores what asks it to stop, seed 14
takes GPU 2 whatever it was given. What stands in the workspace's file "words" is said first.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.contract.compile_artifacts import framed, require_kind, unframed
from trainer.contract.completion import COMPLETE, describe, latest_complete, step_directory, step_of
from trainer.contract.events import EventWriter
from trainer.contract.exit_record import TrainerExit
from trainer.contract.manifest import Manifest
from trainer.contract.warmup_stamp import write_stamp

STEP_S = 0.02
stop_asked: list[int] = []


def save(run_dir: Path, step: int) -> None:
    if (run_dir / "checkpoints" / step_directory(step)).exists():
        return
    partial = run_dir / "checkpoints" / f"{step_directory(step)}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "state.json").write_text(json.dumps({"step": step}))
    (partial / COMPLETE).write_text(describe(partial, ["state.json"]))
    partial.rename(partial.with_suffix(""))


def train(run_dir: Path, *, resume: bool) -> int:
    manifest = Manifest.from_json((run_dir / "manifest.json").read_text())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: stop_asked.append(n))
    if manifest.seed == 14 and os.environ["CUDA_VISIBLE_DEVICES"] != "2":
        os.environ["CUDA_VISIBLE_DEVICES"] = "2"
        again = [sys.executable, "-u", "-m", "trainer", *sys.argv[1:]]
        os.execv(sys.executable, again)  # noqa: S606 - what nvidia-smi sees is the first environment
    config, step = manifest.config, 0
    if resume:
        path, _skipped = latest_complete(run_dir / "checkpoints")
        step = step_of(path.name) if path else 0
    events = EventWriter(run_dir / "metrics.jsonl", manifest.run_id)
    events.write("phase", phase="train", cuda=os.environ["CUDA_VISIBLE_DEVICES"], resumed_at=step)
    print(f"training from step {step} with seed {manifest.seed}", flush=True)
    if manifest.seed == 12:
        subprocess.Popen(["sh", "-c", "trap '' HUP INT TERM; while :; do sleep 0.1; done"])
    if config["optim"]["lr"] == 99.0:
        sys.exit("error: lr 99 explodes")
    while step < config["optim"]["max_steps"]:
        step += 1
        time.sleep(STEP_S)
        print(f"line {step}", flush=True)
        events.write("step", step=step, loss=1.0 / step)
        if step % config["run"]["checkpoint_every_steps"] == 0:
            save(run_dir, step)
        if stop_asked and manifest.seed != 13:
            save(run_dir, step)
            return TrainerExit.STOPPED
    save(run_dir, step)
    events.write("finished", step=step)
    return TrainerExit.FINISHED


def check(run_dir: Path, *, fast: bool) -> int:
    """Answer as the real check does: seed 7 has a fault, 8 breaks, 9 says nothing."""
    manifest = Manifest.from_json((run_dir / "manifest.json").read_text())
    with (run_dir / "calls").open("a") as calls:
        calls.write(f"{fast} {os.environ['CUDA_VISIBLE_DEVICES']}\n")
    if manifest.seed == 8:
        sys.exit("error: no torch here")
    if manifest.seed == 9:
        return TrainerExit.FINISHED
    bad = manifest.seed == 7
    findings = [
        {"name": "rope", "status": "ok", "what": "theta 10000", "where": "", "fix": ""},
        {
            "name": "mask-token",
            "status": "FAIL" if bad else "ok",
            "what": "draft.mask_token_id 1 ends an answer" if bad else "1 is free",
            "where": "train.yaml: draft.mask_token_id" if bad else "",
            "fix": "set draft.mask_token_id to another id" if bad else "",
        },
    ]
    facts = {"fast": fast, "target": "t", "seconds": 0.1, "reused": False}
    print("a library speaks", flush=True)
    print(json.dumps({"kind": "check", "ok": not bad, "findings": findings} | facts), flush=True)
    return TrainerExit.FAULTS if bad else TrainerExit.FINISHED


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    for option in ("--fast", "--json", "--reuse"):
        parser.add_argument(option, action="store_true")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--num-prompts", type=int)
    for option in ("--load-artifacts", "--save-artifacts"):
        parser.add_argument(option, type=Path)
    args = parser.parse_args()
    if (words := args.run_dir.parents[1] / "words").exists():
        sys.stdout.buffer.write(words.read_bytes() + b"\n")
        sys.stdout.buffer.flush()
    if args.verb == "train":
        return train(args.run_dir, resume=args.resume)
    if args.verb == "warmup":
        print("warming up", flush=True)
        report = {"kind": "warmup", "device": "cpu", "warmup_s": 0.5, "num_compiles": 3}
        print(json.dumps(report), flush=True)
        manifest = Manifest.from_json((args.run_dir / "manifest.json").read_text())
        if args.load_artifacts is not None:
            told, data = unframed(args.load_artifacts.read_bytes(), args.load_artifacts)
            require_kind(told, args.load_artifacts, manifest)
            print(f"loaded {data.decode()}", flush=True)
        if args.save_artifacts is not None:
            args.save_artifacts.write_bytes(framed(b"what was compiled", manifest))
        write_stamp(manifest, [report], time.time())
        return 0
    if args.verb == "check":
        return check(args.run_dir, fast=args.fast)
    if args.verb == "evaluate":
        seen, count = args.prompts.read_text(), args.num_prompts
        result = {"acceptance_length": 1.5, "lossless": True, "seen": seen, "num_prompts": count}
        (args.run_dir / "evaluation.json").write_text(json.dumps(result))
        print("evaluated", flush=True)
        return 0
    sys.exit(f"error: {args.verb} fails here on purpose")


if __name__ == "__main__":
    sys.exit(main())
