"""Watch a run: every event and log byte until it ends, over any number of lost links."""

from dataclasses import dataclass

from dflashctl.event_stream import Ended, Follow, OnItem, Start, follow
from dflashctl.inventory import Place
from dflashctl.run_status import Connect
from trainer.contract.layout import Workspace

# Enough for the picture: some thousand steps, and a screen of log.
_EVENT_TAIL_BYTES = 1 << 20
_LOG_TAIL_LINES = 200


@dataclass(frozen=True)
class WatchRequest:
    """Which run. ``whole``: events from the first one and no log, for a program that reads them."""

    place: Place
    tag: str
    whole: bool = False


def watch(request: WatchRequest, connect: Connect, on_item: OnItem) -> Ended:
    """Hand the items of the run to ``on_item`` until the run is over and return how it ended.

    Raises: as ``event_stream.follow``; KeyboardInterrupt leaves the run alone.
    """
    container = request.place.container
    layout = Workspace.at(container.workspace).run(request.tag)
    what = Follow(
        root=str(layout.root),
        log_name=layout.log.name,
        log=Start.none() if request.whole else Start.tail_lines(_LOG_TAIL_LINES),
        events=Start.beginning() if request.whole else Start.tail_bytes(_EVENT_TAIL_BYTES),
        python=container.python,
    )
    return follow(lambda: connect(request.place), what, on_item)
