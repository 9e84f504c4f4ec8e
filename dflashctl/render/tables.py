"""Aligned plain-text tables and the words for figures; no Rich, so that a pipe reads well."""

from collections.abc import Sequence

_GIB = 1 << 30
_MIB = 1 << 20


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned columns with a header line; None becomes ``-``, numbers stand right."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    right = [
        any(isinstance(value, int | float) for value in column)
        and all(value is None or isinstance(value, int | float) for value in column)
        for column in (zip(*rows, strict=True) if rows else [()] * len(headers))
    ]
    widths = [max(len(text) for text in column) for column in zip(headers, *cells, strict=True)]
    lines = []
    for row in [list(headers), *cells]:
        padded = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"


def duration(seconds: float | None) -> str:
    """Return 45s, 12m05s, 3h12m or 2d04h."""
    if seconds is None:
        return "-"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 48 * 3600:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def size(num_bytes: float | None) -> str:
    """Return 22.1 GiB, 512 MiB or 3 B."""
    if num_bytes is None:
        return "-"
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    if num_bytes >= _MIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.0f} KiB"
    return f"{num_bytes:.0f} B"


def figure(value: object, pattern: str) -> str:
    """Return a number by a format such as ``.3f``; ``-`` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return format(value, pattern)
