"""The verb exec: a command in a container as if it ran here."""

import base64
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from dflashctl.cli.verb import Options, Verb, current, finite_seconds

_CHUNK_BYTES = 256 * 1024
_MAX_DOCUMENT_BYTES = 64 * 1024 * 1024  # of each stream, in memory for --json


def register(app: typer.Typer) -> None:
    """Add ``exec`` to ``app``."""
    settings = {"allow_interspersed_args": False}
    app.command("exec", cls=Verb, context_settings=settings)(execute)


def execute(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...")],
    *,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="on this terminal")] = False,
    no_stdin: Annotated[
        bool, typer.Option("--no-stdin", "-n", help="leave standard input to the caller's loop")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", callback=finite_seconds, help="give up after so long"),
    ] = None,
) -> None:
    """Run a command in one container: exact arguments, both streams, its exit status.

    It starts in the root directory with a clean environment and without a shell. Standard input
    goes along unless it is a terminal. Only failures of dflashctl itself print `error[...]`.
    """
    from dflashctl.errors import UsageError
    from dflashctl.operations.execute import ExecuteRequest, execute_on_terminal
    from dflashctl.operations.execute import execute as run

    options = current(ctx)
    if tty and (options.json or timeout is not None or no_stdin):
        raise UsageError("--tty goes with none of --json, --timeout and --no-stdin")
    with closing(options.connect(options.place())) as transport:
        if tty:
            raise typer.Exit(execute_on_terminal(transport, command))
        request = ExecuteRequest(command, () if no_stdin else _standard_input(), timeout)
        if options.json:
            kept = (_Kept("stdout"), _Kept("stderr"))
            status = run(transport, request, kept[0].add, kept[1].add)
            _print_document(options, status, kept)
        else:
            status = run(transport, request, _to(1), _to(2))
    raise typer.Exit(status)


def _to(descriptor: int) -> Any:
    """Return a sink that writes all to a descriptor, at once."""

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    return write


def _standard_input() -> Iterator[bytes]:
    """Yield what stands on standard input, b"" while a writer has nothing; a terminal is left."""
    descriptor = sys.stdin.fileno()
    if os.isatty(descriptor):
        return
    waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    while True:
        if waits and not select.select([descriptor], [], [], 0)[0]:
            yield b""
            continue
        data = os.read(descriptor, _CHUNK_BYTES)
        if not data:
            return
        yield data


class _Kept:
    """A stream kept for --json."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data = bytearray()

    def add(self, chunk: bytes) -> None:
        """Take the next bytes; raises DflashctlError beyond what a document may hold."""
        from dflashctl.errors import DflashctlError

        self.data += chunk
        if len(self.data) > _MAX_DOCUMENT_BYTES:
            raise DflashctlError(
                f"{self.name} is larger than the {_MAX_DOCUMENT_BYTES} bytes that --json keeps",
                hint="leave --json out: the bytes themselves then go to stdout and stderr",
            )

    def fields(self) -> dict[str, str]:
        """Return the stream as text, or in base64 where it is no UTF-8."""
        try:
            text, encoding = self.data.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            text, encoding = base64.b64encode(self.data).decode("ascii"), "base64"
        return {self.name: text, f"{self.name}_encoding": encoding}


def _print_document(options: Options, status: int, kept: tuple[_Kept, _Kept]) -> None:
    from dflashctl.render.document import print_document

    fields: dict[str, Any] = {"place": options.place().container.label, "exit_code": status}
    for stream in kept:
        fields |= stream.fields()
    print_document(fields, ok=status == 0)
