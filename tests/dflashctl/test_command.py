"""Quoting and the pct command line."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.command import pct_exec, quote
from dflashctl.errors import UsageError

WORDS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(words=WORDS)
def test_a_shell_reads_back_exactly_what_was_quoted(words: list[str]) -> None:
    line = "printf '%s\\0' " + quote(words)
    printed = subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout
    assert printed == b"".join(word.encode() + b"\0" for word in words)


@pytest.mark.parametrize("words", [[], ["echo", "a\0b"], ["echo", "x" * 70_000]])
def test_what_no_shell_can_be_given_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        quote(words)


def test_pct_command_is_absolute_closes_options_and_clears_the_environment() -> None:
    argv = pct_exec(200, ["ls", "-la"], "none")
    assert argv[:7] == ["/usr/sbin/pct", "exec", "200", "--", "env", "-i", "HOME=/root"]
    assert argv[-2:] == ["ls", "-la"]


def test_sudo_never_asks_for_a_password() -> None:
    assert pct_exec(200, ["true"], "sudo")[:3] == ["sudo", "-n", "/usr/sbin/pct"]


def test_argument_that_pct_would_garble_is_refused() -> None:
    with pytest.raises(UsageError, match="ASCII"):
        pct_exec(200, ["echo", "ä"], "none")
