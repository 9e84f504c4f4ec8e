"""Log bytes become lines that a terminal may show."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.log_lines import CUT_MARK, LineAssembler, clean


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain\n", "plain"),
        (b"\x1b[32mloss\x1b[0m=2.1", "loss=2.1"),
        (b"\x1b]0;owned\x07text", "text"),
        (b"\x1b]0;owned\x1b\\text", "text"),
        (b"a\x1b]52;c;bm90IGNsb3NlZA==", "a"),
        (b"\x1bP1$r0m\x1b\\x", "x"),
        (b"\x1bcreset", "reset"),
        ("\u009b31mred".encode(), "red"),
        (b"bell\x07 nul\x00 backspace\x08", "bell nul backspace"),
        (b"tab\tstays", "tab\tstays"),
        ("\u202eevil\u202c".encode(), "evil"),
        (b"half \xd0", "half \ufffd"),
        (b"10%\r50%\r100%\r\n", "100%"),
        (b"10%\r50%\r   \r\n", "50%"),
        (b"dos line\r\n", "dos line"),
        (b"[bold]markup[/usr/bin/x]", "[bold]markup[/usr/bin/x]"),
        (b"\r\n", ""),
    ],
)
def test_a_line_is_shown_without_what_could_command_the_terminal(line: bytes, shown: str) -> None:
    assert clean(line) == shown


@given(st.binary(max_size=200))
def test_no_bytes_bring_a_control_character_to_the_screen(line: bytes) -> None:
    assert all(char == "\t" or char.isprintable() or ord(char) > 0x9F for char in clean(line))


@given(st.lists(st.binary(max_size=30), max_size=20))
def test_lines_do_not_depend_on_where_chunks_were_cut(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    pieces, whole = LineAssembler(), LineAssembler()
    cut = [line for chunk in chunks for line in pieces.feed(chunk)]
    assert cut == list(whole.feed(data))
    assert pieces.partial == whole.partial


def test_a_character_split_between_two_chunks_stays_whole() -> None:
    lines, text = LineAssembler(), "модель\n".encode()
    assert list(lines.feed(text[:3])) == []
    assert list(lines.feed(text[3:])) == ["модель"]


def test_an_unfinished_progress_bar_shows_its_last_state() -> None:
    lines = LineAssembler()
    assert list(lines.feed(b"done\n10%\r20")) == ["done"]
    assert list(lines.feed(b"%\r30%")) == []
    assert lines.partial == "30%"


def test_a_line_of_5_megabytes_is_cut_at_64_kib_and_costs_no_more() -> None:
    lines, block = LineAssembler(), b"x" * 65536
    tracemalloc.start()
    for _ in range(80):
        assert list(lines.feed(block)) == []
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(lines.feed(b"\nnext\n")) == ["x" * 65536 + CUT_MARK, "next"]
    assert peak_bytes < 1_000_000


def test_an_endless_progress_bar_costs_no_memory_and_keeps_its_last_state() -> None:
    lines = LineAssembler()
    for number in range(20_000):
        assert list(lines.feed(b"step %d of many\r" % number)) == []
    assert lines.partial == "step 19999 of many"
    assert len(lines._rest) < 100
