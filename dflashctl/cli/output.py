"""Where a verb's words go: its result to stdout, everything on the way to stderr."""

import sys
from typing import Any

from dflashctl.cli.verb import Options
from dflashctl.render.failure import safe_text


def show(options: Options, result: Any, text: str, *, ok: bool = True) -> None:
    """Print a result: its text, or with --json its document."""
    if options.json:
        from dflashctl.render.document import print_document

        print_document(result, ok=ok)
    else:
        sys.stdout.write(safe_text(text))  # names and reasons in it come from elsewhere
        sys.stdout.flush()


def say(line: str) -> None:
    """Tell a step on stderr."""
    sys.stderr.write(f"{safe_text(line)}\n")


def to_stderr(data: bytes) -> None:
    """Pass on what a remote command says."""
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def tell_trips(options: Options, round_trips: int) -> None:
    """Tell with -v how often the place was asked."""
    if options.verbose:
        say(f"{round_trips} round trip{'' if round_trips == 1 else 's'}")
