"""What every way to a place must do, tried with a real shell behind a real sshd."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.errors import StateUnknownError, UnreachableError, UsageError
from dflashctl.transport import Script, Transport, run_script, stream_script
from dflashctl.transport.frame import BOOT
from tests.dflashctl.transport.conftest import require_no_new_thread

ARGUMENTS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    min_size=1,
    max_size=6,
)


@settings(max_examples=12, deadline=None)
@given(arguments=ARGUMENTS)
def test_random_arguments_arrive_unchanged(way: Transport, arguments: list[str]) -> None:
    received: list[bytes] = []
    way.execute(["printf", "%s\\0", *arguments], (), received.append, 100)
    assert b"".join(received) == b"".join(item.encode() + b"\0" for item in arguments)


@settings(max_examples=12, deadline=None)
@given(payload=st.lists(st.binary(max_size=5000), max_size=5))
def test_random_payload_comes_back_unchanged(way: Transport, payload: list[bytes]) -> None:
    result = run_script(way, Script("cat", payload))
    assert (result.rc, result.stdout, result.stderr) == (0, b"".join(payload), b"")


def test_exit_status_and_both_streams_are_the_scripts_own(way: Transport) -> None:
    result = run_script(way, Script("printf 'a\\r\\n'; printf b >&2; exit 37"))
    assert (result.rc, result.stdout, result.stderr) == (37, b"a\r\n", b"b")


@pytest.mark.parametrize("status", [1, 2, 126, 127, 137, 143, 255])
def test_statuses_that_ssh_and_pct_use_themselves_are_told_exactly(
    way: Transport, status: int
) -> None:
    assert run_script(way, Script(f"exit {status}")).rc == status


def test_set_e_ends_the_script_at_the_failing_line(way: Transport) -> None:
    result = run_script(way, Script("set -e\necho one\nfalse\necho two"))
    assert (result.rc, result.stdout) == (1, b"one\n")


def test_exec_in_the_script_still_gives_the_end_mark(way: Transport) -> None:
    result = run_script(way, Script("exec sh -c 'printf %s \"$0\"; exit 4' ü"))
    assert (result.rc, result.stdout) == (4, "ü".encode())


def test_script_that_holds_text_like_marks_is_passed_on(way: Transport) -> None:
    text = "@@0123 begin\n@@0123 rc=0\n@@@@\n@"
    assert run_script(way, Script(f"printf %s '{text}'")).stdout == text.encode()


def test_script_larger_than_one_argument_may_be_runs(way: Transport) -> None:
    text = "\n".join(f": line {number} ü" for number in range(20_000)) + "\necho done"
    assert run_script(way, Script(text)).stdout == b"done\n"


def test_long_standard_error_before_the_output_does_not_hang(way: Transport) -> None:
    result = run_script(way, Script("head -c 5000000 /dev/zero >&2; echo done", deadline_s=100))
    assert (result.stdout, len(result.stderr)) == (b"done\n", 64 * 1024)


def test_20_mb_of_output_come_whole(way: Transport) -> None:
    result = run_script(way, Script("head -c 20000000 /dev/zero | tr '\\0' x"))
    assert result.stdout == b"x" * 20_000_000


def test_20_mb_of_payload_go_both_ways_at_once(way: Transport) -> None:
    block = os.urandom(1 << 20)
    result = run_script(way, Script("cat", [block] * 20, deadline_s=100))
    assert result.stdout == block * 20


def test_payload_that_nobody_reads_does_not_hang(way: Transport) -> None:
    result = run_script(way, Script("echo early", [bytes(1 << 20)] * 8, deadline_s=100))
    assert (result.rc, result.stdout) == (0, b"early\n")


@pytest.mark.parametrize("error", [ValueError("gone"), OSError(5, "gone"), BrokenPipeError("gone")])
def test_error_of_the_payload_reaches_the_caller(way: Transport, error: Exception) -> None:
    def broken() -> Iterator[bytes]:
        yield b"first"
        raise error

    with pytest.raises(type(error), match="gone"):
        run_script(way, Script("cat", broken()))


def test_script_cut_short_by_a_dying_client_does_not_run(way: Transport) -> None:
    received: list[bytes] = []
    argv = ["bash", "-c", BOOT, "dflashctl", "100", "abc"]
    finished = way.execute(argv, [b"echo ran; "], received.append, 100)
    assert (received, finished.status) == ([], 96)


def test_background_process_that_holds_the_output_does_not_hold_the_caller(way: Transport) -> None:
    result = run_script(way, Script("sleep 50 & echo $!", deadline_s=100))
    assert result.elapsed_s < 40
    os.kill(int(result.stdout), signal.SIGKILL)  # it is there


def test_killed_remote_shell_leaves_the_state_unknown(way: Transport) -> None:
    with pytest.raises(StateUnknownError, match="deploy: stopped before its end"):
        run_script(way, Script("echo half; kill -9 $$; sleep 1", what="deploy"))


def test_killed_script_is_told_by_its_signal(way: Transport) -> None:
    assert run_script(way, Script("kill -9 $BASHPID")).rc == 128 + signal.SIGKILL


def test_deadline_ends_a_script_that_hangs(way: Transport) -> None:
    with pytest.raises(UnreachableError, match=r"no end within 0\.5 s") as caught:
        run_script(way, Script("echo begun; sleep 60", deadline_s=0.5))
    assert caught.value.code == "timeout"
    assert run_script(way, Script("echo alive")).stdout == b"alive\n"


def test_stream_gives_each_line_when_it_is_printed(way: Transport) -> None:
    seen: list[bytes] = []

    def go_when_seen() -> Iterator[bytes]:
        while not seen:
            yield b""
        yield b"go\n"

    script = Script("echo one; read -r word; echo two $word", go_when_seen())
    result = stream_script(way, script, seen.append)
    assert seen == [b"one\n", b"two go\n"]
    assert (result.rc, result.stdout) == (0, b"")


def test_stream_gives_up_after_silence_only(way: Transport) -> None:
    lines, moments = [], [time.monotonic()]

    def note(chunk: bytes) -> None:
        lines.append(chunk)
        moments.append(time.monotonic())

    text = "for i in 1 2 3 4; do echo $i; sleep 0.3; done; sleep 60"
    with pytest.raises(UnreachableError, match="no sign of life for 1 s"):
        stream_script(way, Script(text, deadline_s=1.0), note)
    # On a busy machine a line itself may come too late.
    assert b"1\n2\n3\n4\n".startswith(b"".join(lines))
    assert time.monotonic() - moments[-1] >= 1.0


def test_error_of_the_reader_ends_the_stream(way: Transport) -> None:
    def refuse(chunk: bytes) -> None:
        raise LookupError(chunk.decode())

    with pytest.raises(LookupError, match="first"):
        stream_script(way, Script("echo first; sleep 5"), refuse)


def test_text_with_a_nul_byte_is_refused(way: Transport) -> None:
    with pytest.raises(UsageError, match="NUL"):
        run_script(way, Script("echo a\0b"))


def test_each_script_is_one_round_trip(way: Transport) -> None:
    before = way.round_trips
    run_script(way, Script("cat", [b"x"]))
    assert way.round_trips == before + 1


def test_no_thread_is_left_behind(way: Transport) -> None:
    run_script(way, Script("cat", [b"x"]))
    before = set(threading.enumerate())
    for _ in range(5):
        run_script(way, Script("cat", [b"x"]))
    require_no_new_thread(before)
