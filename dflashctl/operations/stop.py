"""stop: end a run with a checkpoint, and say what was proven."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflashctl.gpus import probe
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

    @property
    def clean(self) -> bool:
        """Whether the run is over, left nothing behind, and ended with its checkpoint if asked."""
        over = self.gone and self.session_gone and self.gpus_released is not False
        asked_well = (self.exit or {}).get("state") in ("stopped", "finished")
        return over and (self.ended_before or asked_well)


def stop(
    transport: Transport,
    node: Transport,
    layout: RunLayout,
    grace_s: float,
    say: Callable[[str], None],
) -> StopResult:
    """Stop the run: SIGINT and ``grace_s`` for a checkpoint, SIGTERM, SIGKILL to its group.

    Raises: UsageError when there is no such run.
    """

    def on_line(line: bytes) -> None:
        step = json.loads(line)
        if "signal" in step:
            say(f"{step['signal']} sent to pid {step['pid']}")
        elif "waiting_s" in step:
            say(f"waiting for the checkpoint and the end: {step['waiting_s']:.0f} s")

    answer = stop_run(transport, layout, grace_s, on_line)
    return StopResult(
        tag=layout.tag,
        ended_before=answer["ended_before"],
        signal=answer["signal"],
        gone=answer.get("gone", True),
        exit=answer["exit"],
        session_gone=answer["session_gone"],
        gpus_released=_released(node, layout.tag),
    )


def _released(node: Transport, tag: str) -> bool | None:
    """Say whether no process of the run is left on a GPU of the node."""
    answer = probe(node)
    if not answer.gpus or answer.problem:
        return None
    return not any(owner.tag == tag for gpu in answer.gpus for owner in gpu.owners)
