"""What a regeneration has settled, on disk: a kill at any moment loses only what was in flight.

One line an entry, in the order in which answers came: ``NUMBER KIND JSON``. The first line tells
the settings and the input, so entries and what they were made with cannot part. KIND is ``answer``
(the line to write), ``refused`` (never asked again) or ``given-up`` (asked again by the next run).
"""

import errno
import fcntl
import json
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.durable import is_named, sync
from trainer.errors import DataError
from trainer.regenerate.conversation import encode

ANSWER, REFUSED, GIVEN_UP = "answer", "refused", "given-up"
_ENTRY = re.compile(rb"(\d+) (answer|refused|given-up) ")
_SETTINGS = b"0 settings "
_SETTLED = bytes(kind.encode()[0] for kind in (ANSWER, REFUSED))


class Journal:
    """The entries of one output file; held by one process at a time.

    Raises (constructor): DataError when another process holds it, OSError.
    """

    def __init__(self, path: Path, num_lines: int) -> None:
        self.path = path
        self._end = _open_alone(path)
        self._offsets = array("q", [-1]) * (num_lines + 1)
        self._kinds = bytearray(num_lines + 1)
        self._unsynced = False
        self.settings: dict[str, Any] | None = None
        self._load()

    @property
    def has_answers(self) -> bool:
        """Whether any answer was written yet."""
        return ANSWER.encode()[0] in self._kinds

    def is_settled(self, number: int) -> bool:
        """Whether a line needs no further question."""
        return self._kinds[number] in _SETTLED

    def begin(self, settings: dict[str, Any]) -> None:
        """Start anew with these settings; whatever was written is dropped."""
        os.ftruncate(self._end, 0)
        self._write(_SETTINGS + json.dumps(settings, sort_keys=True).encode() + b"\n")
        self.sync()
        sync(self.path.parent)
        self.settings = settings

    def append(self, number: int, kind: str, value: Any) -> None:
        """Write the entry of a line; it replaces an earlier one. Raises: OSError, as if nothing."""
        offset = self._write(f"{number} {kind} ".encode() + encode(value) + b"\n")
        self._note(number, kind.encode(), offset)

    def sync(self) -> None:
        """Make everything that was appended outlast a crash of the machine."""
        if self._unsynced:
            os.fsync(self._end)
            self._unsynced = False

    def entries(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield (number, kind, value) of every line that has an entry, in the input's order.

        Raises: DataError when an entry is damaged.
        """
        with self.path.open("rb") as stream:
            for number, offset in enumerate(self._offsets):
                if offset >= 0:
                    stream.seek(offset)
                    yield number, *self._read_entry(number, stream.readline())

    def close(self) -> None:
        """Sync and let go of the file."""
        self.sync()
        os.close(self._end)

    def _read_entry(self, number: int, line: bytes) -> tuple[str, dict[str, Any]]:
        match = _ENTRY.match(line)
        try:
            if match is not None and int(match[1]) == number:
                return match[2].decode(), dict(json.loads(line[match.end() :]))
        except (ValueError, TypeError):
            pass
        raise DataError(
            f"{self.path}: the entry of line {number} is damaged; remove that line of the journal"
            " and run the same command again"
        )

    def _write(self, data: bytes) -> int:
        """Append whole lines and return where; what a full disk cut is taken back."""
        offset = os.lseek(self._end, 0, os.SEEK_END)
        self._unsynced = True
        try:
            if os.write(self._end, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._end, offset)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return offset

    def _load(self) -> None:
        """Find every whole entry, and cut off a last line that a kill left unfinished."""
        offset = 0
        with self.path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    os.ftruncate(self._end, offset)
                    break
                if offset == 0 and line.startswith(_SETTINGS):
                    self.settings = self._read_settings(line[len(_SETTINGS) :])
                elif (match := _ENTRY.match(line)) and int(match[1]) < len(self._kinds):
                    self._note(int(match[1]), match[2], offset)
                offset += len(line)

    def _read_settings(self, text: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path}: its first line is damaged; remove it") from error

    def _note(self, number: int, kind: bytes, offset: int) -> None:
        self._offsets[number] = offset
        self._kinds[number] = kind[0]


def _open_alone(path: Path) -> int:
    """Open the file and hold it against other processes."""
    while True:
        end = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(end, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(end)
            raise DataError(f"{path}: another regenerate is at work on the same output") from None
        if is_named(end, path):
            return end
        os.close(end)  # who held it has finished, and removed it
