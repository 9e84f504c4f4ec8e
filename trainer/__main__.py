"""The trainer's command line: ``python -m trainer COMMAND``, most of them with ``--run-dir DIR``.

Status: 0 finished, 1 failed, 2 the configuration or the data is wrong, 7 faults were found, 10
stopped on request. An error is one line ``error: ...``; a failure that is no plain mistake adds its
traceback below.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from trainer.contract.completion import ends_at
from trainer.contract.errors import ContractError
from trainer.contract.events import finished_at
from trainer.contract.exit_record import TrainerExit
from trainer.data import prepare_options
from trainer.errors import (
    CheckpointError,
    DataError,
    ServerError,
    StorageError,
    TargetError,
    TrainerError,
)
from trainer.regenerate import options as regenerate_options

_PLAIN = (ContractError, DataError, TargetError, CheckpointError)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except _PLAIN as error:
        _complain(error)
        return int(TrainerExit.CONFIG)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        return int(TrainerExit.STOPPED)
    except (ServerError, StorageError) as error:  # told in full; where it was raised helps nobody
        _complain(error)
        return int(TrainerExit.FAILED)
    except TrainerError as error:
        _complain(error)
        traceback.print_exc()
        return int(TrainerExit.FAILED)
    except Exception as error:  # noqa: BLE001 - the log must say which, whatever it is
        _complain(error)
        traceback.print_exc()
        return int(TrainerExit.FAILED)


def _run(args: argparse.Namespace) -> int:
    return _COMMANDS[args.command](args)


# Each imports its part when it runs: torch and transformers take seconds, and --help needs neither.


def _train(args: argparse.Namespace) -> int:
    done = finished_at(args.run_dir / "metrics.jsonl") if args.resume else None
    if done is not None and ends_at(args.run_dir / "checkpoints", done):
        sys.stdout.write(
            f"the run has finished, at step {done}; nothing is left to do\n"
            f"next: python -m trainer evaluate --run-dir {args.run_dir} --prompts FILE\n"
        )
        return int(TrainerExit.FINISHED)
    from trainer.session import Session  # noqa: PLC0415

    return int(Session(args.run_dir, resume=args.resume).train())


def _warmup(args: argparse.Namespace) -> int:
    from trainer.warmup import WarmupOptions, warm_up  # noqa: PLC0415

    warm_up(args.run_dir, WarmupOptions(load=args.load_artifacts, save=args.save_artifacts))
    return int(TrainerExit.FINISHED)


def _check(args: argparse.Namespace) -> int:
    from trainer.check.command import CheckOptions, check_run  # noqa: PLC0415

    return int(check_run(args.run_dir, CheckOptions(args.fast, args.reuse, args.json)))


def _export(args: argparse.Namespace) -> int:
    from trainer import results  # noqa: PLC0415

    choice = results.Choice(best=args.best, ema=args.ema)
    results.export_run(args.run_dir, choice, max_shard_bytes=args.max_shard_bytes)
    return int(TrainerExit.FINISHED)


def _evaluate(args: argparse.Namespace) -> int:
    from trainer import results  # noqa: PLC0415

    options = results.EvaluationOptions(
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
        walk_prompts=args.walk_prompts,
        target_dtype=args.target_dtype,
        choice=results.Choice(best=args.best, ema=args.ema),
    )
    results.evaluate_run(args.run_dir, options)
    return int(TrainerExit.FINISHED)


def _regenerate(args: argparse.Namespace) -> int:
    options = regenerate_options.from_arguments(args)
    from trainer.regenerate.run import regenerate  # noqa: PLC0415

    regenerate(options)
    return int(TrainerExit.FINISHED)


def _prepare(args: argparse.Namespace) -> int:
    options = prepare_options.from_arguments(args)
    from trainer.data.prepare import prepare, report  # noqa: PLC0415

    sys.stdout.write("\n".join(report(prepare(options))) + "\n")
    return int(TrainerExit.FINISHED)


def _replay(args: argparse.Namespace) -> int:
    from trainer.replay import replay  # noqa: PLC0415

    return int(TrainerExit.FINISHED if replay(args.run_dir, args.batch) else TrainerExit.FAILED)


def _doctor(args: argparse.Namespace) -> int:
    from trainer.doctor.report import diagnose_run  # noqa: PLC0415

    return int(diagnose_run(args.run_dir, args.samples, as_json=args.json))


def _convert(args: argparse.Namespace) -> int:
    from trainer.export.convert import convert  # noqa: PLC0415

    size = args.max_shard_bytes
    made = convert(
        args.source,
        args.directory,
        args.to,
        args.target,
        verifier=args.verifier,
        max_shard_bytes=size,
    )
    sys.stdout.write(
        f"{made.directory}: {made.num_tensors} tensors in the {made.layout} layout, layer ids"
        f" {made.shift:+d}\n"
    )
    return int(TrainerExit.FINISHED)


def _validate(args: argparse.Namespace) -> int:
    from trainer.export.validate import validate  # noqa: PLC0415

    report = validate(args.directory, args.engine or ["all"], args.target)
    text = json.dumps(report.to_dict()) + "\n" if args.json else report.table()
    sys.stdout.write(text)
    return int(TrainerExit.FINISHED if report.ok else TrainerExit.FAULTS)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "validate": _validate,
    "warmup": _warmup,
    "check": _check,
    "convert": _convert,
    "doctor": _doctor,
    "evaluate": _evaluate,
    "export": _export,
    "prepare": _prepare,
    "regenerate": _regenerate,
    "replay": _replay,
}


def _complain(error: BaseException) -> None:
    text = str(error) or type(error).__name__
    if not isinstance(error, TrainerError | ContractError):
        text = f"{type(error).__name__}: {text}"
    sys.stderr.write(f"error: {' '.join(text.split())}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("--run-dir", type=Path, required=True, help="holds manifest.json")
        return made

    train = command("train", "train to the end of the plan")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    _add_launch_arguments(
        command("warmup", "fill the compile caches with the run's own shapes"),
        command("check", "prove before a launch that training and serving agree"),
        command("doctor", "report on data, plan, disk and memory, and judge them"),
    )
    again = command("replay", "run a batch again that was not finite; name the first bad tensor")
    again.add_argument("--batch", type=Path, required=True, help="failed_batch_*.safetensors")
    measure = command("evaluate", "measure the acceptance length by real decoding")
    measure.add_argument("--prompts", type=Path, required=True, help="JSONL of chats")
    measure.add_argument("--num-prompts", type=int, help="prompts to decode; all when left out")
    measure.add_argument("--max-new-tokens", type=int, default=128)
    measure.add_argument("--walk-prompts", type=int, default=0, help="chats for the estimate")
    measure.add_argument(
        "--target-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="equality with plain decoding is exact in float32 alone",
    )
    out = command("export", "write the newest checkpoint in the z-lab layout")
    out.add_argument("--max-shard-bytes", type=int, default=5_000_000_000, help="of one file")
    for chooser in (measure, out):
        chooser.add_argument(
            "--best", action="store_true", help="the checkpoint that evaluations found best"
        )
        chooser.add_argument("--ema", action="store_true", help="the average of the weights")
    text = "make tokenised shards of files of chats"
    prepare_options.add_arguments(commands.add_parser("prepare", help=text, description=text))
    text = "have the answers of chats written anew by the target, through its server"
    regenerate_options.add_arguments(commands.add_parser("regenerate", help=text, description=text))
    _add_export_commands(commands)
    return parser


def _add_launch_arguments(
    fill: argparse.ArgumentParser, check: argparse.ArgumentParser, look: argparse.ArgumentParser
) -> None:
    """Add the arguments of warmup, check and doctor, which come before a launch."""
    fill.add_argument(
        "--save-artifacts", type=Path, metavar="FILE", help="also write the caches into one file"
    )
    fill.add_argument(
        "--load-artifacts",
        type=Path,
        metavar="FILE",
        help="begin with such a file of yours, from a host with this torch and these GPUs",
    )
    check.add_argument("--fast", action="store_true", help="without the target's weights")
    check.add_argument(
        "--reuse", action="store_true", help="do not make a fast check again that has passed"
    )
    check.add_argument("--json", action="store_true", help="one JSON document, no table")
    look.add_argument(
        "--samples", type=int, default=32, help="chats the target is asked about; 0 loads none"
    )
    look.add_argument("--json", action="store_true", help="one JSON document on one line")


def _add_export_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "write an export in the other layout; embedding and head come from the target"
    change = commands.add_parser("convert", help=text, description=text)
    change.add_argument("source", type=Path, metavar="SRC", help="an exported directory")
    change.add_argument("directory", type=Path, metavar="DST", help="where to write")
    change.add_argument("--to", choices=("speculators", "zlab"), required=True)
    change.add_argument("--target", type=Path, help="the target model's directory")
    change.add_argument("--verifier", help="hub id of the target, for readers elsewhere")
    change.add_argument("--max-shard-bytes", type=int, default=5_000_000_000, help="of one file")
    text = "say which engines can load an export, without running one"
    judge = commands.add_parser("validate", help=text, description=text)
    judge.add_argument("directory", type=Path, metavar="DIR", help="an exported directory")
    judge.add_argument(
        "--engine",
        action="append",
        help="vllm, sglang, speculators, llamacpp, mlx, tensorrt-llm or all (the default)",
    )
    judge.add_argument("--target", type=Path, help="the target model's directory")
    judge.add_argument("--json", action="store_true", help="one JSON document, no table")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # while it starts, SIGTERM is a request to stop as SIGINT is
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk, or nobody reads: the status still counts
            stream.flush()
    # A thread that hangs in a compiler cannot be joined; the interpreter's own end would wait.
    os._exit(status)
