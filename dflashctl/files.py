"""Bytes to a place: releases and single files, as tar on stdin, verified over there."""

import io
import json
import os
import shlex
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.bundle import Bundle
from dflashctl.errors import DflashctlError, RefusedError, UsageError
from dflashctl.program import Program, run_program
from dflashctl.transport import stream_script
from dflashctl.transport.base import Script, Transport
from trainer.contract.completion import digest_file

_CHUNK_BYTES = 1 << 18
_COMPARE_S = 600.0  # hashing tens of GB over there takes minutes
_TRANSFER_S = 6 * 3600.0
_FETCH_SILENCE_S = 60.0


@dataclass(frozen=True)
class Outgoing:
    """A local file and the name that it gets below the remote directory."""

    path: Path
    name: str
    mode: int
    sha256: str
    size_bytes: int

    def entry(self) -> list[Any]:
        """Return the line of the list that the receiving program reads."""
        return [self.name, self.mode, self.sha256, self.size_bytes]


def collect(sources: Sequence[Path]) -> list[Outgoing]:
    """List the files of ``sources``; a directory keeps its own name, as with ``cp -r``.

    Raises: UsageError for a path that is not there, is neither, or gives a name twice.
    """
    found: dict[str, Outgoing] = {}
    for source in sources:
        top = Path(os.path.abspath(source))  # noqa: PTH100 - not resolve(): a link keeps its name
        if top.is_dir():
            paths = sorted(path for path in top.rglob("*") if path.is_file())
        elif top.is_file():
            paths = [top]
        else:
            raise UsageError(
                f"{source}: no such file or directory",
                hint=f"ls {source.parent}   (on this machine)",
            )
        for path in paths:
            entry = _outgoing(path, path.relative_to(top.parent).as_posix())
            if entry.name in found:
                raise UsageError(
                    f"two sources give the name {entry.name}",
                    place=str(path),
                    hint="push them one by one, to different directories",
                )
            found[entry.name] = entry
    return list(found.values())


def _outgoing(path: Path, name: str) -> Outgoing:
    status = path.stat()
    mode = 0o755 if status.st_mode & 0o100 else 0o644
    return Outgoing(path, name, mode, digest_file(path), status.st_size)


def wanted(transport: Transport, outgoing: Sequence[Outgoing], directory: str) -> list[Outgoing]:
    """Return the files that are absent or different below ``directory``; one round trip."""
    arguments = {"directory": directory, "action": "compare"}
    program = Program("receive", arguments, [_listing(outgoing)], _COMPARE_S)
    names = set(run_program(transport, program)["wanted"])
    return [entry for entry in outgoing if entry.name in names]


def send(transport: Transport, outgoing: Sequence[Outgoing], directory: str) -> int:
    """Send files; each appears by rename once its sha256 was verified there; one round trip.

    Returns the number of files written. Raises: MismatchError when a file changed on the way.
    """
    payload = _payload(outgoing)
    arguments = {"directory": directory, "action": "receive"}
    answer = run_program(transport, Program("receive", arguments, payload, _TRANSFER_S))
    return int(answer["written"])


def fetch(
    transport: Transport,
    source: str,
    target: Path,
    max_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write a file of the place to ``target``, which the caller checks; one round trip.

    ``on_bytes`` gets the size of each block. Raises: RefusedError beyond ``max_bytes``;
    DflashctlError when either side cannot.
    """
    num_bytes = 0

    def write(data: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise RefusedError(
                f"{source} is larger than {max_bytes} bytes",
                place=transport.place,
                code="too-large",
            )
        stream.write(data)
        on_bytes(len(data))

    script = Script(f"exec cat -- {shlex.quote(source)}", (), _FETCH_SILENCE_S, "fetch")
    try:
        with target.open("wb") as stream:
            result = stream_script(transport, script, write)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise DflashctlError(
            f"cannot write {target}: {error.strerror}", code="no-room", hint="make room there"
        ) from error
    result.check(DflashctlError, f"cannot read {source}", place=transport.place)


def send_release(transport: Transport, bundle: Bundle, workspace: str) -> dict[str, Any]:
    """Send a release; it appears under its digest whole or not at all; one round trip."""
    arguments = {
        "workspace": workspace,
        "digest": bundle.digest,
        "files": {f.path: [f.mode, f.sha256] for f in bundle.files},
    }
    return run_program(transport, Program("unpack", arguments, [bundle.tar_bytes()], 600.0))


def look_at_release(transport: Transport, bundle: Bundle, workspace: str) -> dict[str, Any]:
    """Ask what the workspace holds of a release; one round trip."""
    arguments = {
        "workspace": workspace,
        "digest": bundle.digest,
        "files": {f.path: f.sha256 for f in bundle.files},
    }
    return run_program(transport, Program("releases", arguments))


def _listing(outgoing: Sequence[Outgoing]) -> bytes:
    return json.dumps([entry.entry() for entry in outgoing]).encode() + b"\n"


def _payload(outgoing: Sequence[Outgoing]) -> Iterator[bytes]:
    yield _listing(outgoing)
    for entry in outgoing:
        member = tarfile.TarInfo(entry.name)
        member.size, member.mode = entry.size_bytes, entry.mode
        yield member.tobuf(tarfile.PAX_FORMAT)
        with entry.path.open("rb") as stream:
            yield from _padded(stream, entry.size_bytes)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _padded(stream: io.BufferedReader, size: int) -> Iterator[bytes]:
    """Yield exactly ``size`` bytes and the padding of tar, whatever happens to the file now."""
    left = size
    while left:
        chunk = stream.read(min(_CHUNK_BYTES, left))
        if not chunk:
            # It shrank: the digest over there will differ and say so.
            chunk = b"\0" * min(_CHUNK_BYTES, left)
        left -= len(chunk)
        yield chunk
    yield b"\0" * (-size % tarfile.BLOCKSIZE)
