"""Bring files of a run to the laptop, each checked against the container's sha256.

Files arrive in ``runs/TAG/.pull`` and are renamed into ``runs/TAG`` once the manifest, which
comes last, has confirmed them. What a kill leaves in ``.pull`` is used by the next pull.
"""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    MismatchError,
    RefusedError,
    StateUnknownError,
    UnreachableError,
    UsageError,
)
from dflashctl.inventory import Place
from dflashctl.program import Program
from dflashctl.received import Fact, Received, problems, unpack
from dflashctl.run_status import Connect
from dflashctl.run_store import locked_directory
from dflashctl.transport import stream_script
from dflashctl.transport.base import Transport
from trainer.contract.completion import digest_file
from trainer.contract.layout import Workspace

KINDS = ("logs", "metrics", "export", "checkpoints")
_STAGING = ".pull"
_CHUNK_BYTES = 1 << 20
_SILENCE_S = 600.0  # the container hashes what the laptop has before it sends the rest


@dataclass(frozen=True)
class PullRequest:
    """Which run, what of it (some of KINDS), and where to: ``directory`` is runs/TAG."""

    place: Place
    tag: str
    what: Sequence[str]
    directory: Path
    max_bytes: int = 64 << 30


@dataclass(frozen=True)
class PullResult:
    """Names of the files that came and of those that were here already; bytes received."""

    directory: str
    received: tuple[str, ...]
    unchanged: tuple[str, ...]
    received_bytes: int


def pull(
    request: PullRequest, connect: Connect, on_bytes: Callable[[int], None] = lambda _: None
) -> PullResult:
    """Receive, check and put in place. ``on_bytes`` gets the size of each block as it comes.

    Raises: MismatchError (exit 7) naming the files that do not match, after the good ones were
    put in place; RefusedError beyond the size limit, when the record here is of another run, or
    while another pull of it is at work here.
    """
    unknown = [kind for kind in request.what if kind not in KINDS]
    if unknown or not request.what:
        raise UsageError(
            f"--what {','.join(unknown)}: choose some of {', '.join(KINDS)}",
            hint=f"dflashctl pull {request.tag} --what logs,metrics",
        )
    staging = request.directory / _STAGING
    handle = locked_directory(staging)  # else each would move what the other half received
    if handle is None:
        raise RefusedError(
            f"another pull of {request.tag} is at work here",
            place=str(request.directory),
            code="locked",
            hint="wait for its end, then run the same command again",
        )
    try:
        return _pull(request, connect, staging, on_bytes)
    finally:
        for directory in (staging, request.directory):
            with contextlib.suppress(OSError):
                directory.rmdir()  # when nothing came
        os.close(handle)


def _pull(
    request: PullRequest, connect: Connect, staging: Path, on_bytes: Callable[[int], None]
) -> PullResult:
    transport = connect(request.place)
    try:
        had = _scan(request.directory, request.what) | _scan(staging, request.what)
        received = _receive(transport, request, staging, had, on_bytes)
    except MismatchError as error:
        if error.code == "hostile-archive":  # what came before it is of the same sender
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        transport.close()
    wrong = problems(received, had)
    _check_run(request, staging)
    for name in wrong:
        (staging / name).unlink(missing_ok=True)
    manifest = received.manifest or {}
    for name in sorted(manifest.keys() - wrong.keys()):
        _put_in_place(staging / name, request.directory / name)
    if wrong:
        told = "; ".join(f"{name}: {why}" for name, why in sorted(wrong.items()))
        raise MismatchError(
            f"{len(wrong)} of {len(manifest)} files do not match: {told}",
            place=transport.place,
            hint=f"dflashctl pull {request.tag}   (brings only what is missing)",
        )
    shutil.rmtree(staging, ignore_errors=True)
    return PullResult(
        directory=str(request.directory),
        received=tuple(sorted(received.files)),
        unchanged=tuple(sorted(manifest.keys() - received.files.keys())),
        received_bytes=sum(fact.size_bytes for fact in received.files.values()),
    )


def _receive(
    transport: Transport,
    request: PullRequest,
    staging: Path,
    had: dict[str, Fact],
    on_bytes: Callable[[int], None],
) -> Received:
    """Run the collect program and unpack its tar as it comes, in a thread of its own."""
    container = request.place.container
    layout = Workspace.at(container.workspace).run(request.tag)
    arguments = {"root": str(layout.root), "log": layout.log.name, "what": list(request.what)}
    have = json.dumps({name: [fact.size_bytes, fact.sha256] for name, fact in had.items()})
    program = Program(
        "collect",
        arguments,
        payload=(have.encode(),),
        deadline_s=_SILENCE_S,
        python=container.python,
    )
    reader_fd, writer_fd = os.pipe()
    unpacking = _Unpacking(os.fdopen(reader_fd, "rb"), staging, request.max_bytes, on_bytes)
    unpacking.start()
    try:
        with os.fdopen(writer_fd, "wb", buffering=0) as writer:
            result = stream_script(transport, program.script(), lambda data: _all(writer, data))
    except BrokenPipeError:
        unpacking.join()
        hint = f"dflashctl pull {request.tag}   (what is here and right is not sent again)"
        raise unpacking.failure or MismatchError("the archive ended early", hint=hint) from None
    except ContainerDownError:
        raise  # its hint says how to start it
    except (UnreachableError, StateUnknownError) as error:
        error.hint = f"dflashctl pull {request.tag}   (goes on where this one stopped)"
        raise
    finally:
        unpacking.join()
    if result.rc == 1 and b"no run directory" in result.stderr:
        raise UsageError(
            f"there is no run {request.tag}", place=transport.place, code="no-such-run",
            hint="dflashctl runs list",
        )  # fmt: skip
    result.check(DflashctlError, "collecting the files failed", place=transport.place)
    if unpacking.failure is not None:
        raise unpacking.failure
    return unpacking.received


class _Unpacking(threading.Thread):
    """Unpacks the stream; on a failure it closes its end, so that the writer stops."""

    def __init__(
        self, stream: IO[bytes], staging: Path, max_bytes: int, on_bytes: Callable[[int], None]
    ) -> None:
        super().__init__(name="unpack", daemon=True)
        self._stream = stream
        self._staging = staging
        self._max_bytes = max_bytes
        self._on_bytes = on_bytes
        self.received = Received()
        self.failure: DflashctlError | None = None

    def run(self) -> None:
        with self._stream as stream:
            try:
                self.received = unpack(stream, self._staging, self._max_bytes, self._on_bytes)
                while stream.read(_CHUNK_BYTES):
                    pass  # padding behind the archive
            except DflashctlError as error:
                self.failure = error


def _all(writer: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[writer.write(left) :]


def _scan(directory: Path, what: Sequence[str]) -> dict[str, Fact]:
    """Return the files below ``directory`` with their digests; hidden ones and links apart."""
    found: dict[str, Fact] = {}
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if path.is_symlink() or not path.is_file() or any(p.startswith(".") for p in name.parts):
            continue
        if name.parts[0] in set(KINDS) - set(what):
            continue  # not asked for: do not read gigabytes of checkpoints
        found[name.as_posix()] = Fact(path.stat().st_size, digest_file(path))
    return found


def _check_run(request: PullRequest, staging: Path) -> None:
    """Refuse to mix two runs that had the same tag at different times."""
    record, arrived = request.directory / "manifest.json", staging / "manifest.json"
    if not record.is_file() or not arrived.is_file():
        return
    ids = []
    for path in (record, arrived):
        try:
            ids.append(json.loads(path.read_bytes()).get("run_id"))
        except (ValueError, AttributeError) as error:
            raise MismatchError(
                f"{path} is not readable: {error}", hint=f"mv {path.parent} {path.parent}.old"
            ) from error
    if ids[0] != ids[1]:
        raise RefusedError(
            f"{request.directory} holds another run of this tag ({ids[0]}, there: {ids[1]})",
            code="other-run",
            hint=f"move it away first: mv {request.directory} {request.directory}.old",
        )


def _put_in_place(staged: Path, final: Path) -> None:
    """Rename a staged file to its place; one that was here before stays."""
    if not staged.exists():
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    staged.replace(final)
