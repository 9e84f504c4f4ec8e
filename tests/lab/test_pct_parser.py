"""The stand-in pct's command line alone: what Getopt::Long does as PVE sets it up."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.lab.pct import Die, boolean, parse, permissions, usage


@pytest.mark.parametrize(
    ("command", "argv", "expected"),
    [
        ("exec", ["200", "--", "ls", "-la"], {"vmid": "200", "extra-args": ["ls", "-la"]}),
        # Options may stand anywhere before "--", with one dash, as a unique prefix, with "=".
        ("exec", ["-k", "0", "200", "ls"], {"keep-env": "0", "vmid": "200", "extra-args": ["ls"]}),
        ("exec", ["200", "ls", "--keep=0"], {"keep-env": "0", "vmid": "200", "extra-args": ["ls"]}),
        ("exec", ["200", "ls", "-k", "-k"], {"keep-env": "1", "vmid": "200", "extra-args": ["ls"]}),
        ("exec", ["200", "echo", "-v", "5"], {"vmid": "200", "extra-args": ["echo"]}),
        ("exec", ["200", "--", "--", "x"], {"vmid": "200", "extra-args": ["--", "x"]}),
        ("exec", ["200", "-", "-5"], {"vmid": "200", "extra-args": ["-", "-5"]}),
        ("status", ["--vmid", "200"], {"vmid": "200"}),
        ("status", ["200", "--verbose"], {"vmid": "200", "verbose": "1"}),
        (
            "push",
            ["200", "--perms", "600", "a", "--user=root", "b"],
            {"vmid": "200", "file": "a", "destination": "b", "perms": "600", "user": "root"},
        ),
        ("list", [], {}),
    ],
)
def test_values_are_found_where_perl_finds_them(
    command: str, argv: list[str], expected: dict[str, Any]
) -> None:
    assert parse(command, argv) == expected


@given(st.lists(st.text()))
def test_whatever_follows_two_dashes_is_kept_as_it_is(words: list[str]) -> None:
    assert parse("exec", ["200", "--", *words])["extra-args"] == words


@pytest.mark.parametrize(
    ("command", "argv", "text"),
    [
        ("exec", ["200", "ls", "-la"], "400 unable to parse option\n"),
        ("push", ["200", "a", "b", "--perms"], "400 unable to parse option\n"),
        ("exec", [], "400 not enough arguments\n"),
        ("push", ["200", "a"], "400 not enough arguments\n"),
        ("list", ["200"], "400 too many arguments\n"),
        (
            "status",
            ["0200"],
            "400 Parameter verification failed.\nvmid: invalid format - value ",
        ),
        ("status", ["1234567890"], "400 Parameter verification failed.\nvmid: invalid format"),
        (
            "status",
            ["2OO"],
            "400 Parameter verification failed.\nvmid: type check ('integer') ",
        ),
    ],
)
def test_a_wrong_command_line_dies_with_the_usage(command: str, argv: list[str], text: str) -> None:
    with pytest.raises(Die) as death:
        parse(command, argv)
    assert str(death.value).startswith(text)
    assert str(death.value).endswith(usage(command) + "\n")
    assert death.value.code == 255


@pytest.mark.parametrize(
    ("command", "argv", "complaint"),
    [
        ("status", ["200", "-v"], "Option v is ambiguous (verbose, vmid)\n"),
        ("config", ["200", "--nonsense"], "Unknown option: nonsense\n"),
        ("push", ["200", "a", "b", "-p"], "Option p requires an argument\n"),
        ("exec", ["200", "ls", "-la", "-x=1"], "Unknown option: la\nUnknown option: x\n"),
    ],
)
def test_each_bad_option_is_named_on_stderr(
    capsys: pytest.CaptureFixture[str], command: str, argv: list[str], complaint: str
) -> None:
    with pytest.raises(Die):
        parse(command, argv)
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize(
    ("perms", "mode"), [("600", 0o600), ("0644", 0o644), ("0x1ff", 0o777), ("0X1", 1)]
)
def test_permissions_are_octal_unless_they_begin_with_0x(perms: str, mode: int) -> None:
    assert permissions({"perms": perms}) == mode
    assert permissions({}) is None


def test_booleans_are_read_as_pve_reads_them() -> None:
    for text in ("1", "on", "Yes", "TRUE"):
        assert boolean({"x": text}, "x", default=False)
    for text in ("0", "off", "No", "FALSE"):
        assert not boolean({"x": text}, "x", default=True)
    assert boolean({}, "x", default=True)
    with pytest.raises(Die, match="400 unable to parse boolean option"):
        boolean({"x": "2"}, "x", default=True)
