"""What ``python -m trainer prepare`` is asked for; imports nothing heavy, --help reads it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import DataError

TRUNCATION = ("keep-prefix", "drop")
THINKING = ("keep", "strip", "both")


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare.

    truncation: keep-prefix cuts a chat at max_length tokens, drop leaves it out. thinking: keep,
    strip (leave reasoning out) or both (a chat that reasons gives two samples). shard_samples:
    records of a slice. num_workers: processes; None is one a core, 1 works in this process.
    """

    inputs: tuple[Path, ...]
    output: Path
    target: str
    revision: str | None = None
    max_length: int = 3072
    truncation: str = "keep-prefix"
    thinking: str = "keep"
    dedup: bool = True
    shard_samples: int = 4096
    num_workers: int | None = None

    def check(self) -> None:
        """Raise DataError for a value that cannot be."""
        if self.truncation not in TRUNCATION:
            raise DataError(f"--truncation: expected one of {', '.join(TRUNCATION)}")
        if self.thinking not in THINKING:
            raise DataError(f"--thinking: expected one of {', '.join(THINKING)}")
        least = {"max_length": 2, "shard_samples": 1, "num_workers": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                flag = "--" + name.replace("_", "-")
                raise DataError(f"{flag}: expected at least {minimum}, got {value}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``prepare``."""
    new = PrepareOptions
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        action="append",
        nargs="+",
        help="JSONL, Parquet, a Hugging Face data set on disk, or a directory of them; repeatable",
    )
    parser.add_argument("--output", type=Path, required=True, help="a directory of its own")
    parser.add_argument("--target", required=True, help="the target's directory or hub id")
    parser.add_argument("--revision", help="of a hub id")
    parser.add_argument(
        "--max-length", type=int, default=new.max_length, help="tokens a chat keeps (%(default)s)"
    )
    parser.add_argument(
        "--truncation",
        choices=TRUNCATION,
        default=new.truncation,
        help="what happens to a longer chat (%(default)s)",
    )
    parser.add_argument(
        "--thinking",
        choices=THINKING,
        default=new.thinking,
        help="the reasoning in answers: both makes two samples of such a chat (%(default)s)",
    )
    parser.add_argument(
        "--dedup",
        action=argparse.BooleanOptionalAction,
        default=new.dedup,
        help="leave out chats that repeat an earlier one word for word",
    )
    parser.add_argument(
        "--shard-samples",
        type=int,
        default=new.shard_samples,
        help="records that make a shard (%(default)s)",
    )
    parser.add_argument("--num-workers", type=int, help="processes; one a core when left out")


def from_arguments(args: argparse.Namespace) -> PrepareOptions:
    """Return the options of a parsed command line. Raises: DataError."""
    options = PrepareOptions(
        inputs=tuple(path for group in args.input for path in group),
        output=args.output,
        target=args.target,
        revision=args.revision,
        max_length=args.max_length,
        truncation=args.truncation,
        thinking=args.thinking,
        dedup=args.dedup,
        shard_samples=args.shard_samples,
        num_workers=args.num_workers,
    )
    options.check()
    return options
