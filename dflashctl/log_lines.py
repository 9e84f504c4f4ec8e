"""Log bytes as lines safe to show: no escapes, progress bars collapsed, long lines cut.

A log may hold anything: colours, window titles, half UTF-8 characters at the end of a chunk,
progress bars drawn with carriage returns, lines of megabytes. The bytes themselves stay untouched
in the log file; only what reaches a screen goes through here.
"""

import re
from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024
CUT_MARK = " [... line cut at 64 KiB]"

# ECMA-48: CSI sequences; OSC, DCS, SOS, PM, APC strings up to BEL or ST (or the end of the line
# when they are never closed); other escapes.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|\Z)"
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
# C0 but tab, DEL, C1, and the marks that turn the direction of text around.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(line: bytes) -> str:
    """Return the text of one line as a terminal may show it, without its line end.

    Of parts separated by carriage returns (a progress bar) the last that is not empty stays.
    """
    text = _ESCAPES.sub("", line.rstrip(b"\r\n").decode("utf-8", "replace"))
    shown = [part for part in text.split("\r") if part.strip()]
    return _CONTROLS.sub("", shown[-1] if shown else "")


class LineAssembler:
    """Turns log bytes as they arrive into clean lines; each comes out once, when it is whole."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that ``data`` completes."""
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._append(piece)
            yield self.partial
            self._rest.clear()
            self._cut = False
        self._append(rest)

    @property
    def partial(self) -> str:
        """The unfinished last line, or the last state of an unfinished progress bar."""
        return clean(bytes(self._rest)) + (CUT_MARK if self._cut else "")

    def restart(self) -> None:
        """Forget an unfinished line: the file starts anew."""
        self._rest.clear()
        self._cut = False

    def _append(self, piece: bytes) -> None:
        # What stands before a carriage return that something follows will never be shown.
        drawn_over = piece.rstrip(b"\r").rfind(b"\r")
        if drawn_over >= 0:
            self._rest.clear()
            self._cut = False
            piece = piece[drawn_over + 1 :]
        elif self._rest.endswith(b"\r") and piece.strip(b"\r"):
            self._rest.clear()
            self._cut = False
        room = MAX_LINE_BYTES - len(self._rest)
        self._cut = self._cut or len(piece) > room
        self._rest += piece[:room]
