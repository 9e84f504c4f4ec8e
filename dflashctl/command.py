"""Pure quoting: argv lists joined once for each shell that will parse them.

sshd gives the login shell one string, so argv is joined once with shlex; pct and lxc-attach parse
nothing and take argv as it is.
"""

import shlex
from collections.abc import Sequence
from typing import Literal

from dflashctl.errors import UsageError

Become = Literal["none", "sudo"]

PCT = "/usr/sbin/pct"  # not on the PATH of users other than root
MAX_COMMAND_BYTES = 64 * 1024  # Linux refuses one argument of 128 KiB; data goes by stdin

# pct keeps the node session's environment (HOME, LANG, CUDA_VISIBLE_DEVICES); this replaces it.
CONTAINER_ENVIRONMENT = (
    "env",
    "-i",
    "HOME=/root",
    "LANG=C.UTF-8",
    "LC_ALL=C.UTF-8",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/root/.local/bin",
)


def quote(argv: Sequence[str]) -> str:
    """Join ``argv`` into one line that a POSIX shell parses back into exactly ``argv``.

    Raises: UsageError for an empty argv, a NUL byte, or a line of more than 64 KiB.
    """
    if not argv:
        raise UsageError("an empty command cannot be run")
    for argument in argv:
        if "\0" in argument:
            raise UsageError(f"an argument holds a NUL byte: {argument[:60]!r}")
    line = shlex.join(argv)
    size = len(line.encode("utf-8", "surrogateescape"))
    if size > MAX_COMMAND_BYTES:
        raise UsageError(
            f"the command line has {size} bytes; at most {MAX_COMMAND_BYTES} can be passed",
            hint="send long text on standard input",
        )
    return line


def pct_exec(vmid: int, argv: Sequence[str], become: Become) -> list[str]:
    """Return the node's argv that runs ``argv`` in container ``vmid`` with a clean environment.

    ``--`` always stands before the command: pct takes options after the vmid as its own.
    Raises: UsageError for text outside ASCII, which pct under LC_ALL=C turns into U+FFFD.
    """
    for argument in argv:
        if not argument.isascii():
            raise UsageError(
                f"pct passes ASCII arguments only, found {argument[:60]!r}",
                hint="send other text on standard input",
            )
    sudo = ["sudo", "-n"] if become == "sudo" else []
    return [*sudo, PCT, "exec", str(vmid), "--", *CONTAINER_ENVIRONMENT, *argv]
