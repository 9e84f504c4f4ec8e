"""The marks of a framed script, cut out of any stream of chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.errors import StateUnknownError
from dflashctl.transport.base import EnoughRead, readable
from dflashctl.transport.frame import FrameParser

NONCE = "00ff"
BEGIN, END = b"@@00ff begin\n", b"@@00ff rc="
PIECES = st.lists(
    st.one_of(st.binary(max_size=20), st.sampled_from([b"@", b"@@", BEGIN[:-2], END[:-1], b"\n"])),
    max_size=8,
).map(b"".join)


def feed(stream: bytes, cuts: list[int]) -> tuple[bytes, FrameParser]:
    """Give ``stream`` to a parser in pieces that end at ``cuts``."""
    kept: list[bytes] = []
    parser = FrameParser(NONCE, kept.append)
    places = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    try:
        for start, end in itertools.pairwise(places):
            parser.feed(stream[start:end])
    except EnoughRead:
        pass
    return b"".join(kept), parser


@given(
    noise=PIECES.filter(lambda data: BEGIN not in data),
    data=PIECES.filter(lambda data: END not in data),
    after=st.binary(max_size=10),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    status=st.integers(0, 255),
)
def test_exactly_the_bytes_between_the_marks_come_out_however_the_stream_is_cut(
    noise: bytes, data: bytes, after: bytes, cuts: list[int], status: int
) -> None:
    stream = noise + BEGIN + data + END + str(status).encode() + b"\n" + after
    out, parser = feed(stream, cuts)
    assert (out, parser.rc) == (data, status)


@given(data=PIECES.filter(lambda data: END not in data), cuts=st.lists(st.integers(0, 400)))
def test_without_an_end_mark_there_is_no_status(data: bytes, cuts: list[int]) -> None:
    out, parser = feed(BEGIN + data, cuts)
    assert (parser.rc, parser.begun) == (None, True)
    assert data.startswith(out)
    assert len(data) - len(out) < len(END)


def test_whole_line_is_passed_on_at_once() -> None:
    out, _ = feed(BEGIN + b"step 1\n", [])
    assert out == b"step 1\n"


def test_status_cut_in_its_digits_waits_for_the_rest() -> None:
    kept: list[bytes] = []
    parser = FrameParser(NONCE, kept.append)
    parser.feed(BEGIN + END + b"13")
    assert parser.rc is None
    with pytest.raises(EnoughRead):
        parser.feed(b"7\n")
    assert parser.rc == 137


def test_mark_of_another_nonce_is_data() -> None:
    out, parser = feed(BEGIN + b"@@00fe rc=0\n" + END + b"0\n", [])
    assert (out, parser.rc) == (b"@@00fe rc=0\n", 0)


def test_noise_without_end_is_refused_and_not_kept() -> None:
    parser = FrameParser(NONCE, print)
    with pytest.raises(StateUnknownError, match="before the script began"):
        parser.feed(b"x" * 2_000_000)
    assert len(parser.noise) == 1024


def test_perl_locale_warning_is_no_part_of_a_message() -> None:
    text = (
        b"perl: warning: Setting locale failed.\n"
        b"perl: warning: Please check that your locale settings:\n"
        b'\tLANGUAGE = (unset),\n\tLC_ALL = (unset),\n\tLANG = "it_IT.UTF-8"\n'
        b"    are supported and installed on your system.\n"
        b'perl: warning: Falling back to the standard locale ("C").\n'
        b"bash: warning: setlocale: LC_ALL: cannot change locale (it_IT.UTF-8)\n"
        b"container '201' not running!\n"
    )
    assert readable(text) == "container '201' not running!"
