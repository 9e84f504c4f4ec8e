"""Send files of one run as a tar on stdout, the last member being a manifest with their sha256.

Standard library only; dflashctl sends this text to ``python3 -I -S -c TEXT JSON``, with one JSON
object on stdin: the files the reader has already, ``{PATH: [SIZE, SHA256]}``. By hand:

    echo '{}' | python3 dflashctl/remote/collect.py '{"root": "/workspace/runs/x",
        "log": "train_stdout_x.log", "what": ["logs", "metrics"]}' | tar -tvf -

what: logs, metrics, export, checkpoints (complete ones alone); small records always come along.
A file that the reader has with the same digest is named in the manifest and not sent. A log that
grows is cut where it ended when it was opened. environment.json is never sent: it holds secrets.
"""

import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "pull-manifest.json"
RECORDS = re.compile(r"(manifest|process|evaluations?|exit|exit_\d+)\.json\Z")
CHUNK_BYTES = 1 << 20


class Sent(io.RawIOBase):
    """Exactly ``size`` bytes of a file, hashed on their way; zeros where it became shorter."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.left = size
        self.digest = hashlib.sha256()
        self.is_short = False

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        wanted = self.left if size < 0 else min(size, self.left)
        data = self.file.read(wanted)
        if len(data) < wanted:
            self.is_short = True
            data += bytes(wanted - len(data))
        self.left -= len(data)
        self.digest.update(data)
        return data


def sha256_of(file: BinaryIO, size: int) -> str:
    """Return the digest of the first ``size`` bytes and go back to the beginning."""
    digest = hashlib.sha256()
    while size > 0 and (data := file.read(min(size, CHUNK_BYTES))):
        digest.update(data)
        size -= len(data)
    file.seek(0)
    return digest.hexdigest()


def below(directory: Path) -> Iterator[Path]:
    """Yield the regular files below ``directory`` in order; links are not followed."""
    # Not rglob, which fails when a checkpoint is rotated away under it.
    for path in sorted(Path(at) / name for at, _, names in os.walk(directory) for name in names):
        if path.is_file() and not path.is_symlink():
            yield path


def wanted_files(root: Path, log: Path, what: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each file asked for."""
    for path in sorted(root.iterdir()):
        if RECORDS.match(path.name) and path.is_file():
            yield path.name, path
    for path in (log, root / "runner_stderr.log") if "logs" in what else ():
        if path.is_file():
            yield path.name, path
    if "metrics" in what and (root / "metrics.jsonl").is_file():
        yield "metrics.jsonl", root / "metrics.jsonl"
    directories = [root / "export"] if "export" in what else []
    if "checkpoints" in what:
        complete = sorted((root / "checkpoints").glob("step_*/COMPLETE.json"))
        directories += [path.parent for path in complete if path.parent.name[5:].isdigit()]
    for directory in directories:
        for path in below(directory):
            yield path.relative_to(root).as_posix(), path


def send(archive: tarfile.TarFile, name: str, path: Path, have: Any) -> dict[str, Any]:
    """Send one file unless the reader has it; return its line of the manifest."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if have and have[0] == size and have[1] == sha256_of(file, size):
            return {"size_bytes": size, "sha256": have[1], "sent": False}
        member = tarfile.TarInfo(name)
        member.size, member.mode = size, 0o644
        source = Sent(file, size)
        archive.addfile(member, source)
    fact = {"size_bytes": size, "sha256": source.digest.hexdigest(), "sent": True}
    return fact | {"problem": "it became shorter while it was read"} if source.is_short else fact


def main() -> None:
    """Send the files of the run that argv[1] names."""
    asked = json.loads(sys.argv[1])
    have = json.loads(sys.stdin.buffer.read() or b"{}")
    root = Path(asked["root"])
    if not root.is_dir():
        sys.exit(f"there is no run directory {root}")
    try:
        pinned = json.loads((root / "manifest.json").read_bytes())["log_path"]
    except (OSError, ValueError, KeyError, TypeError):
        pinned = None
    files: dict[str, dict[str, Any]] = {}
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name, path in wanted_files(root, Path(pinned or root / asked["log"]), asked["what"]):
            try:
                files[name] = send(archive, name, path, have.get(name))
            except FileNotFoundError:  # a checkpoint that was rotated away
                problem = "it vanished while it was read"
                files[name] = {"size_bytes": 0, "sha256": "", "sent": False, "problem": problem}
        text = json.dumps({"v": 1, "files": files}).encode()
        member = tarfile.TarInfo(MANIFEST)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    main()
