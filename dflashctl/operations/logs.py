"""The bytes of a run's log: all, the last lines (counted in the container), or as they come."""

from collections.abc import Callable
from dataclasses import dataclass

from dflashctl.event_stream import Ended, Follow, Item, LogBytes, Notice, Start, follow, read_once
from dflashctl.inventory import Place
from dflashctl.run_status import Connect
from trainer.contract.layout import Workspace


@dataclass(frozen=True)
class LogsRequest:
    """Which run; num_lines: None for the whole log; follow: go on until the run is over."""

    place: Place
    tag: str
    num_lines: int | None = None
    follow: bool = False


def logs(
    request: LogsRequest,
    connect: Connect,
    on_bytes: Callable[[bytes], None],
    on_notice: Callable[[Notice], None],
) -> Ended | None:
    """Hand the log to ``on_bytes``, each byte once and unchanged; return the end when following.

    Raises: as ``event_stream.follow``.
    """

    def sort_out(item: Item) -> None:
        if isinstance(item, LogBytes):
            on_bytes(item.data)
        elif isinstance(item, Notice):
            on_notice(item)

    container = request.place.container
    layout = Workspace.at(container.workspace).run(request.tag)
    everything = request.num_lines is None
    what = Follow(
        root=str(layout.root),
        log_name=layout.log.name,
        log=Start.beginning() if everything else Start.tail_lines(request.num_lines or 0),
        events=Start.none(),
        python=container.python,
    )
    if request.follow:
        return follow(lambda: connect(request.place), what, sort_out)
    read_once(lambda: connect(request.place), what, sort_out)
    return None
