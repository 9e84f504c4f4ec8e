"""Watch a run: every event and log byte until it ends, over any number of lost links."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue

from dflashctl.event_stream import Ended, Follow, Item, Notice, OnItem, Start, follow
from dflashctl.inventory import Place
from dflashctl.landing import LandingWatch
from dflashctl.remote_run import remote_manifest
from dflashctl.run_status import Connect
from dflashctl.transport.base import Transport
from trainer.contract.layout import Workspace
from trainer.contract.manifest import Manifest

# Enough for the picture: some thousand steps, and a screen of log.
_EVENT_TAIL_BYTES = 1 << 20
_LOG_TAIL_LINES = 200


@dataclass(frozen=True)
class Landings:
    """How to look where a run landed: the way to its node, and its manifest if it is known here."""

    connect_node: Callable[[], Transport]
    recorded: Manifest | None


@dataclass(frozen=True)
class WatchRequest:
    """Which run. ``whole``: events from the first one and no log, for a program that reads them."""

    place: Place
    tag: str
    whole: bool = False


def watch(
    request: WatchRequest, connect: Connect, on_item: OnItem, landing: Landings | None = None
) -> Ended:
    """Hand the items of the run to ``on_item`` until the run is over and return how it ended.

    ``landing`` says how to look whether the run holds its own GPUs; None does not look.
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
    if landing is None:
        return follow(lambda: connect(request.place), what, on_item)
    strayed: SimpleQueue[str] = SimpleQueue()

    def hand_on(item: Item) -> None:
        while not strayed.empty():
            on_item(Notice("strayed", strayed.get()))
        on_item(item)

    def manifest() -> Manifest | None:
        if landing.recorded is not None:
            return landing.recorded
        with closing(connect(request.place)) as inside:
            return remote_manifest(inside, request.place, request.tag)

    with LandingWatch(landing.connect_node, manifest, strayed.put):
        return follow(lambda: connect(request.place), what, hand_on)
