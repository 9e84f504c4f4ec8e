"""attach: the run's own terminal, on the user's."""

import shlex
import sys

from dflashctl.errors import DflashctlError, UsageError
from dflashctl.remote_run import tmux_socket
from dflashctl.transport import run_script
from dflashctl.transport.base import Script, Transport
from trainer.contract.layout import RunLayout


def attach(transport: Transport, layout: RunLayout) -> int:
    """Attach to the run's tmux session; returns tmux's exit status.

    Raises: DflashctlError when there is no session (the run has ended, or it runs without tmux),
    UsageError when there is one and standard input is no terminal to show it on.
    """
    tmux = ["tmux", "-S", tmux_socket(layout)]
    session = ["-t", f"={layout.tag}"]
    # Asked first: attach-session may end with 0 although there is nothing to attach to.
    script = Script(shlex.join([*tmux, "has-session", *session]), what="has-session")
    status = run_script(transport, script).rc
    if status == 0:
        if not sys.stdin.isatty():
            raise UsageError("attach needs a terminal", hint=f"dflashctl logs {layout.tag} -f")
        status = transport.interactive([*tmux, "attach-session", *session])
    if status != 0:
        raise DflashctlError(
            f"no tmux session {layout.tag} to attach to (exit status {status})",
            hint=f"dflashctl status {layout.tag}; dflashctl logs {layout.tag}",
            place=transport.place,
            code="no-session",
        )
    return status
