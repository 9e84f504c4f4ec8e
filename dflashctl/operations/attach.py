"""attach: the run's own terminal, on the user's."""

from dflashctl.errors import DflashctlError
from dflashctl.remote_run import tmux_socket
from dflashctl.transport.base import Transport
from trainer.contract.layout import RunLayout


def attach(transport: Transport, layout: RunLayout) -> int:
    """Attach to the run's tmux session; returns tmux's exit status.

    Raises: DflashctlError when there is no session (the run has ended, or it runs without tmux).
    """
    socket = tmux_socket(layout)
    argv = ["tmux", "-S", socket, "attach-session", "-t", f"={layout.tag}"]
    status = transport.interactive(argv)
    if status != 0:
        raise DflashctlError(
            f"no tmux session {layout.tag} to attach to (exit status {status})",
            hint=f"dflashctl status {layout.tag}; dflashctl logs {layout.tag}",
            place=transport.place,
            code="no-session",
        )
    return status
