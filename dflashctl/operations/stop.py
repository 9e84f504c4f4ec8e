"""stop: end a run with a checkpoint, and say what was proven."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.gpu_locks import Lock, ask, read_locks
from dflashctl.gpus import parse
from dflashctl.inventory import Container
from dflashctl.remote_run import stop_run
from dflashctl.transport.base import Transport
from trainer.contract.layout import RunLayout


@dataclass(frozen=True)
class StopResult:
    """What was proven: the signal that worked, the exit record, what is released.

    ``gpus_released`` is None when the run held no GPU or the driver gave no clear answer.
    """

    tag: str
    ended_before: bool
    signal: str | None
    gone: bool
    exit: dict[str, Any] | None
    session_gone: bool
    gpus_released: bool | None
    locks_kept: tuple[Lock, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether the run is over, left nothing behind, and ended with its checkpoint if asked."""
        over = self.gone and self.session_gone and self.gpus_released is not False
        asked_well = (self.exit or {}).get("state") in ("stopped", "finished")
        return over and (self.ended_before or asked_well)


@dataclass(frozen=True)
class StopRequest:
    """Which run, and the seconds for its checkpoint; token: of its GPU locks, where known."""

    container: Container
    layout: RunLayout
    grace_s: float
    token: str | None = None


def stop(
    transport: Transport, node: Transport, request: StopRequest, say: Callable[[str], None]
) -> StopResult:
    """Stop the run: SIGINT and ``grace_s`` for a checkpoint, SIGTERM, SIGKILL to its group.

    Its GPU locks are let go once none of its processes lives.
    Raises: UsageError when there is no such run.
    """
    layout = request.layout

    def on_line(line: bytes) -> None:
        step = json.loads(line)
        if "signal" in step:
            say(f"{step['signal']} sent to pid {step['pid']}")
        elif "waiting_s" in step:
            say(f"waiting for the checkpoint and the end: {step['waiting_s']:.0f} s")

    answer = stop_run(transport, layout, request.grace_s, on_line)
    released, kept = _released(node, request)
    return StopResult(
        tag=layout.tag,
        ended_before=answer["ended_before"],
        signal=answer["signal"],
        gone=answer.get("gone", True),
        exit=answer["exit"],
        session_gone=answer["session_gone"],
        gpus_released=released,
        locks_kept=kept,
    )


def _released(node: Transport, request: StopRequest) -> tuple[bool | None, tuple[Lock, ...]]:
    """Let go of the run's locks; say whether no process of it is left on a GPU of the node."""
    run_dir, vmid = str(request.layout.root), request.container.vmid
    run = {"token": request.token, "vmid": vmid, "run_dir": run_dir}
    raw = ask(node, "release", run=run, look=True)
    answer, kept = parse(raw), read_locks(raw, "kept")
    if not answer.gpus or answer.problem:
        return None, kept
    tag = request.layout.tag
    left = [o for gpu in answer.gpus for o in gpu.owners if (o.tag, o.vmid) == (tag, vmid)]
    return not left, kept
