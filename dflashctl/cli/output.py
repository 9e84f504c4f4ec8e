"""Where a verb's words go: its result to stdout, everything on the way to stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflashctl.cli.verb import Options
from dflashctl.log_lines import LineAssembler
from dflashctl.render.failure import safe_text


def show(options: Options, result: Any, text: str, *, ok: bool = True) -> None:
    """Print a result: its text, or with --json its document."""
    if options.json:
        from dflashctl.render.document import print_document

        print_document(result, ok=ok)
    else:
        show_text(text)


def show_text(text: str) -> None:
    """Print text on stdout; names and reasons in it come from elsewhere, so it is made safe."""
    sys.stdout.write(safe_text(text))
    sys.stdout.flush()


def warn_text(text: str) -> None:
    """Print text on stderr, made safe."""
    sys.stderr.write(safe_text(text))


def say(line: str) -> None:
    """Tell a step on stderr."""
    warn_text(f"{line}\n")


@contextmanager
def relay() -> Iterator[Callable[[bytes], None]]:
    """Yield a sink that passes on to stderr what a remote command says, in lines made safe."""
    lines = LineAssembler()

    def take(data: bytes) -> None:
        sys.stderr.writelines(f"{line}\n" for line in lines.feed(data))
        sys.stderr.flush()

    try:
        yield take
    finally:
        if lines.partial:
            sys.stderr.write(f"{lines.partial}\n")


def tell_trips(options: Options, round_trips: int) -> None:
    """Tell with -v how often the place was asked."""
    if options.verbose:
        say(f"{round_trips} round trip{'' if round_trips == 1 else 's'}")
