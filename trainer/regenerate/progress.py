"""The progress line: how far, how fast, what went wrong, how long it will take."""

import sys
import time

from trainer.regenerate.conversation import Reply

_LINE_S = 10.0  # between two lines in a log


class Progress:
    """Counts what happens and shows it on stderr: one line rewritten on a terminal, else a few."""

    def __init__(self, num_chats: int, num_settled: int) -> None:
        self._num_chats, self._num_before = num_chats, num_settled
        self.num_settled = num_settled
        self.num_rejected = 0
        self.num_given_up = 0
        self._num_cut = 0
        self._num_tokens = 0
        self._began_s = self._shown_s = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._width = 0

    def answered(self, reply: Reply) -> None:
        """Count an answer."""
        self._num_cut += reply.cut
        self._num_tokens += reply.num_tokens or 0

    def show(self, trouble: str | None) -> None:
        """Show the line when it is due; ``trouble``: the last failure since the last answer."""
        now = time.monotonic()
        if not self._on_terminal and now - self._shown_s < _LINE_S:
            return
        self._shown_s = now
        line = self.line(now - self._began_s, trouble)
        if self._on_terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the rewritten line."""
        if self._on_terminal and self._width:
            sys.stderr.write("\n")

    def line(self, elapsed_s: float, trouble: str | None) -> str:
        """Return the line."""
        done = self.num_settled - self._num_before
        rate = done / max(elapsed_s, 1e-9)
        share = self.num_settled / self._num_chats
        parts = [
            f"{self.num_settled}/{self._num_chats} conversations ({share:.1%})",
            f"{rate:.1f}/s",
            f"{self._num_tokens / max(elapsed_s, 1e-9):.0f} tok/s",
        ]
        counted = (
            (self._num_cut, "cut"),
            (self.num_rejected, "rejected"),
            (self.num_given_up, "given up"),
        )
        parts += [f"{count} {what}" for count, what in counted if count]
        if done:
            parts.append(f"eta {_clock((self._num_chats - self.num_settled) / rate)}")
        return "  ".join(parts) + (f"  [{trouble}]" if trouble else "")


def say(text: str) -> None:
    """Tell the user something, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m"
