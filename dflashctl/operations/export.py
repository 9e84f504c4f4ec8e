"""export: the draft of a run's last checkpoint in the z-lab layout, in its run directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflashctl.remote_run import TrainerCommand, run_trainer
from dflashctl.transport.base import Transport
from trainer.contract.layout import RunLayout


@dataclass(frozen=True)
class ExportResult:
    """Where the exported draft lies in the container."""

    tag: str
    directory: str
    round_trips: int


def export(
    transport: Transport,
    layout: RunLayout,
    on_output: Callable[[bytes], None],
    options: Sequence[str] = (),
) -> ExportResult:
    """Write the export; ``options``: further words for the trainer.

    Raises: DflashctlError when the trainer failed.
    """
    argv = ["export", "--run-dir", str(layout.root), *options]
    run_trainer(transport, TrainerCommand(str(layout.root), argv), on_output)
    return ExportResult(layout.tag, str(layout.export), transport.round_trips)
