"""Follow a run from the laptop: its events and log bytes, each exactly once.

A program in the container (``remote/follow.py``) sends records; this side keeps the position of
every file, so that over any number of lost links it goes on at the next byte. A stream that ends
means nothing by itself: only an ``end`` record, sent when the run is over, ends the follow.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    MismatchError,
    StateUnknownError,
    UnreachableError,
    UsageError,
)
from dflashctl.program import Program
from dflashctl.transport import stream_script
from dflashctl.transport.base import Script, Transport
from trainer.contract.errors import ContractError
from trainer.contract.events import EventDecoder
from trainer.contract.exit_record import ExitRecord

SILENCE_S = 15.0  # the program sends a beat every 2 s; no byte for this long is a dead link
_MAX_HEADER_BYTES = 4096
_MAX_PAYLOAD_BYTES = 1 << 20
_AGAIN = "run the same command again; dflashctl status tells how the run stands"


@dataclass(frozen=True)
class Start:
    """Where to begin in a file that has not been read yet."""

    argument: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def beginning(cls) -> "Start":
        """Everything."""
        return cls()

    @classmethod
    def tail_lines(cls, num_lines: int) -> "Start":
        """The last lines, counted in the container."""
        return cls({"tail_lines": num_lines})

    @classmethod
    def tail_bytes(cls, num_bytes: int) -> "Start":
        """The whole lines within the last bytes."""
        return cls({"tail_bytes": num_bytes})

    @classmethod
    def none(cls) -> "Start":
        """Nothing of this file."""
        return cls({"skip": True})


@dataclass(frozen=True)
class Follow:
    """What to follow: the run directory ``root`` in the container, and where to begin."""

    root: str
    log_name: str
    log: Start = Start()
    events: Start = Start()
    python: str = "python3"


@dataclass(frozen=True)
class LogBytes:
    """Bytes of the log, in order."""

    data: bytes


@dataclass(frozen=True)
class RunEvent:
    """One event of metrics.jsonl, as trainer.contract.events describes it."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Heartbeat:
    """The link is alive: the container's clock, and the process: alive, starting or gone.

    gpus_lost: what the container's nvidia-smi said instead of GPUs, else "".
    """

    now_unix_s: float
    process: str
    gpus_lost: str = ""


@dataclass(frozen=True)
class Notice:
    """Something the reader should know.

    kind: disconnected, connected, truncated, replaced, or strayed (to GPUs of others).
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Ended:
    """The run is over: finished, stopped, failed, killed, lost or never-started.

    ``record`` is exit.json; None for lost (process gone without one) and never-started.
    """

    state: str
    record: ExitRecord | None


Item = LogBytes | RunEvent | Heartbeat | Notice | Ended
OnItem = Callable[[Item], None]


@dataclass(frozen=True)
class Backoff:
    """Seconds between attempts to reconnect, doubling from first to limit; down_s is how long a
    container that stopped is waited for."""

    first_s: float = 0.5
    limit_s: float = 15.0
    down_s: float = 60.0


@dataclass(frozen=True)
class Record:
    """One record of the follow program."""

    header: dict[str, Any]
    payload: bytes


class RecordDecoder:
    """Turns the program's bytes into whole records; a record cut by a lost link never comes out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._header: dict[str, Any] | None = None

    def feed(self, data: bytes) -> Iterator[Record]:
        """Yield the records completed by ``data``. Raises: StateUnknownError for other bytes."""
        self._rest += data
        while True:
            if self._header is None:
                line, newline, _ = self._rest[:_MAX_HEADER_BYTES].partition(b"\n")
                if not newline:
                    if len(self._rest) >= _MAX_HEADER_BYTES:
                        raise self._foreign()
                    return
                self._header = self._parse(bytes(line))
                del self._rest[: len(line) + 1]
            length = self._header["n"]
            if len(self._rest) < length:
                return
            record = Record(self._header, bytes(self._rest[:length]))
            del self._rest[:length]
            self._header = None
            yield record

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            header: dict[str, Any] = json.loads(line)
            if isinstance(header["k"], str) and 0 <= int(header["n"]) <= _MAX_PAYLOAD_BYTES:
                return header
        except (ValueError, KeyError, TypeError):
            pass
        raise self._foreign()

    def _foreign(self) -> StateUnknownError:
        start = bytes(self._rest[:80])
        return StateUnknownError(
            f"the follow program answered something else: {start!r}", hint=_AGAIN
        )


class _File:
    """Where one file stands; survives reconnects."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._id = ""
        self._offset = 0
        self._head = ""

    def argument(self) -> dict[str, Any]:
        """Return where the program has to begin."""
        if not self._id:
            return self._start.argument
        return {"id": self._id, "offset": self._offset, "head": self._head}

    def stand(self, record: Record) -> None:
        """Take the place where the program begins to read."""
        header = record.header
        self._id, self._offset, self._head = str(header["id"]), int(header["o"]), header["head"]

    def advance(self, record: Record) -> bytes:
        """Take and return the bytes of a record; what follows is asked for from their end."""
        header = record.header
        self._id, self._head = str(header["id"]), header.get("head", self._head)
        self._offset = int(header["o"]) + len(record.payload)
        return record.payload

    def restart(self) -> None:
        """The file begins anew at offset 0."""
        self._start = Start.beginning()
        self._id, self._offset, self._head = "", 0, ""


class _Session:
    """What survives the links: file positions, the event decoder and how far the run is."""

    def __init__(self, what: Follow, on_item: OnItem, *, once: bool) -> None:
        self._what = what
        self._on_item = on_item
        self._once = once
        self._files = {"log": _File(what.log), "events": _File(what.events)}
        self._events = EventDecoder()
        self._records = RecordDecoder()
        self.failure: BaseException | None = None
        self.lost_at: float | None = None  # monotonic; None while connected
        self.met = False  # a record ever came
        self.place = ""  # of the newest link
        self.end: Record | None = None

    def script(self) -> Script:
        """Return the program with the present positions; a new link begins."""
        self._records = RecordDecoder()
        arguments = {
            "root": self._what.root,
            "log": self._what.log_name,
            "start": {name: file.argument() for name, file in self._files.items()},
            "once": self._once,
        }
        python = self._what.python
        return Program("follow", arguments, deadline_s=SILENCE_S, python=python).script()

    def feed(self, data: bytes) -> None:
        """Take bytes of the link. What the reader raises is kept, so that no transport hides it."""
        try:
            for record in self._records.feed(data):
                self._take(record)
        except BaseException as error:
            self.failure = error
            raise

    def emit(self, item: Item) -> None:
        """Hand one item to the reader."""
        self._on_item(item)

    def _take(self, record: Record) -> None:
        kind = record.header["k"]
        self.met = True
        if kind == "hello" and self.lost_at is not None:
            away_s = time.monotonic() - self.lost_at
            self.emit(Notice("connected", f"connected again after {away_s:.0f} s, nothing missed"))
        self.lost_at = None
        if kind == "log":
            self.emit(LogBytes(self._files["log"].advance(record)))
        elif kind == "events":
            self._take_events(self._files["events"].advance(record))
        elif kind == "at":
            self._files[record.header["f"]].stand(record)
        elif kind == "note":
            self._take_note(record.header["f"], record.header["why"])
        elif kind == "beat":
            told = record.header
            lost = str(told.get("gpus", ""))
            self.emit(Heartbeat(float(told["now"]), str(told["process"]), lost))
        elif kind == "end":
            self.end = record

    def _take_events(self, data: bytes) -> None:
        try:
            for event in self._events.feed(data):
                self.emit(RunEvent(event))
        except ContractError as error:
            raise MismatchError(
                f"metrics.jsonl: {error}", hint="install a newer dflashctl"
            ) from error

    def _take_note(self, name: str, why: str) -> None:
        self._files[name].restart()
        if name == "events":
            self._events = EventDecoder()
        what = "the log" if name == "log" else "metrics.jsonl"
        done = "was truncated" if why == "truncated" else "was replaced by another file"
        self.emit(Notice(why, f"{what} {done}; reading it from its beginning"))


def follow(
    connect: Callable[[], Transport],
    what: Follow,
    on_item: OnItem,
    *,
    backoff: Backoff | None = None,
) -> Ended:
    """Hand every item of the run to ``on_item`` until the run is over; blocks.

    connect: opens a way to the container; called again after a lost link. Each byte of log and
    events is handed over exactly once. A failure of the first link is raised, later ones are
    reported as notices and tried again for as long as it takes (TrustError is always raised).
    Raises: UsageError when there is no such run, UnreachableError, TrustError, StateUnknownError.
    """
    session = _Session(what, on_item, once=False)
    backoff = backoff or Backoff()
    wait_s = backoff.first_s
    while session.end is None:
        reason = _attempt(connect, session, down_s=backoff.down_s)
        if session.end is not None:
            break
        if session.lost_at is None:
            session.lost_at = time.monotonic()
            wait_s = backoff.first_s
        session.emit(Notice("disconnected", f"{reason}; trying again in {wait_s:g} s"))
        time.sleep(wait_s)
        wait_s = min(backoff.limit_s, wait_s * 2)
    ended = _ended(session.end, what, session.place)
    on_item(ended)
    return ended


def read_once(connect: Callable[[], Transport], what: Follow, on_item: OnItem) -> None:
    """Hand over what is there now, then return. Raises: as ``follow``."""
    session = _Session(what, on_item, once=True)
    reason = _attempt(connect, session, down_s=0.0)
    if session.end is None:
        raise UnreachableError(f"the log was cut short: {reason}", hint=_AGAIN)
    if session.end.header["why"] == "absent":
        raise _absent(what, session.place)


def _attempt(connect: Callable[[], Transport], session: _Session, *, down_s: float) -> str:
    """Use one link until it ends and return why it ended."""
    transport: Transport | None = None
    try:
        transport = connect()
        session.place = transport.place
        result = stream_script(transport, session.script(), session.feed)
    except (UnreachableError, StateUnknownError) as error:
        if session.failure is not None:
            raise session.failure from None
        away_s = time.monotonic() - session.lost_at if session.lost_at is not None else 0.0
        if not session.met or (isinstance(error, ContainerDownError) and away_s > down_s):
            raise
        return f"link lost ({error.message})"
    finally:
        if transport is not None:
            transport.close()
    if session.failure is not None:
        raise session.failure
    if session.end is None and (not session.met or 0 < result.rc < 128):
        result.check(DflashctlError, "following the run failed", place=transport.place)
        raise StateUnknownError(
            "the follow program ended without a word", place=transport.place, hint=_AGAIN
        )
    return f"the follow program ended (status {result.rc})"


def _ended(record: Record, what: Follow, place: str) -> Ended:
    why = record.header["why"]
    if why == "absent":
        raise _absent(what, place)
    if why != "exit":
        return Ended(why, None)
    try:
        exit_record = ExitRecord.from_json(record.payload.decode("utf-8", "replace"))
    except ContractError as error:
        raise MismatchError(
            str(error), place=f"{what.root}/exit.json", hint="install a newer dflashctl"
        ) from error
    return Ended(exit_record.state, exit_record)


def _absent(what: Follow, place: str) -> UsageError:
    return UsageError(
        f"there is no run directory {what.root}",
        place=place,
        code="no-such-run",
        hint="dflashctl runs list",
    )
