"""Log bytes on stdout: exactly as they are into a pipe or file, cleaned on a terminal."""

from collections.abc import Callable
from typing import TextIO

from dflashctl.log_lines import LineAssembler


def log_writer(stream: TextIO) -> Callable[[bytes], None]:
    """Return a function that writes bytes of a log to ``stream`` and flushes.

    On a terminal whole lines are shown without escape sequences, which could otherwise retitle it
    or paste into it; an unfinished last line waits for its end.
    """
    if stream.isatty():
        lines = LineAssembler()

        def write_clean(data: bytes) -> None:
            stream.writelines(f"{line}\n" for line in lines.feed(data))
            stream.flush()

        return write_clean

    def write(data: bytes) -> None:
        stream.buffer.write(data)
        stream.flush()

    return write
