"""What pct, sudo and lxc-attach say when they refuse, and what the user is told."""

import pytest

from dflashctl.errors import (
    ContainerDownError,
    DflashctlError,
    RefusedError,
    StateUnknownError,
    TrustError,
    UsageError,
)
from dflashctl.transport.base import Finished
from dflashctl.transport.refusal import refusal

# The texts are those of pve-container 4 to 6, sudo 1.9, lxc 5 and bash 5.
CASES = [
    ("container '201' not running!\n", ContainerDownError, "pct start 201"),
    ("lxc-attach: 201: attach.c: Failed to get init pid\n", ContainerDownError, "pct start 201"),
    (
        "Configuration file 'nodes/kpro6/lxc/201.conf' does not exist\n",
        UsageError,
        "pct list",
    ),
    ("CT is locked (backup)\n", RefusedError, "backup"),
    (
        "can't lock file '/run/lock/lxc/pve-config-201.lock' - got timeout\n",
        RefusedError,
        "backup",
    ),
    ("please run as root\n", TrustError, "become: sudo"),
    ("sudo: a password is required\n", TrustError, "NOPASSWD: /usr/sbin/pct"),
    ("sudo: sorry, you must have a tty to run sudo\n", TrustError, "NOPASSWD: /usr/sbin/pct"),
    ("ops is not in the sudoers file.\n", TrustError, "NOPASSWD: /usr/sbin/pct"),
    (
        "Sorry, user ops is not allowed to execute '/usr/sbin/pct exec' as root on kpro6.\n",
        TrustError,
        "NOPASSWD: /usr/sbin/pct",
    ),
    ("bash: line 1: sudo: command not found\n", TrustError, "root@"),
    ("sh: 1: sudo: not found\n", TrustError, "root@"),
    ("bash: line 1: /usr/sbin/pct: No such file or directory\n", UsageError, "`self`"),
    ("sudo: /usr/sbin/pct: command not found\n", UsageError, "`self`"),
    ("Unknown option: la\n400 unable to parse option\npct exec <vmid>\n", UsageError, "pct help"),
    ("400 Parameter verification failed.\nvmid: bad\n", UsageError, "vmid"),
    ("lxc-attach: 201: bash: No such file or directory\n", UsageError, "apt install bash"),
    ("env: 'bash': No such file or directory\n", UsageError, "apt install bash"),
    ("env: ‘bash’: No such file or directory\n", UsageError, "apt install bash"),  # noqa: RUF001
    ("dflashctl: script cut short\n", StateUnknownError, "again"),
]


@pytest.mark.parametrize(("text", "kind", "hint"), CASES, ids=[case[0][:30] for case in CASES])
@pytest.mark.parametrize("status", [1, 2, 255])
def test_refusal_is_told_by_its_text_whatever_the_status(
    text: str, kind: type[DflashctlError], hint: str, status: int
) -> None:
    noise = "perl: warning: Setting locale failed.\n"
    error = refusal(Finished(status, (noise + text).encode()), "kpro6/201")
    assert type(error) is kind
    assert error.place == "kpro6/201"
    assert hint in error.hint
    assert "perl" not in error.message


def test_unknown_text_is_no_refusal() -> None:
    assert refusal(Finished(255, b"something else\n"), "kpro6/201") is None
