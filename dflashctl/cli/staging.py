"""What verbs about a run to come share: its configuration, and the open ways to its place."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.output import say
from dflashctl.cli.verb import Options

if TYPE_CHECKING:
    from dflashctl.gpu_roles import Ways
    from dflashctl.inventory import Place
    from dflashctl.transport.base import Transport
    from trainer.contract.config import TrainConfig

TrainFile = Annotated[
    Path | None,
    typer.Option("--train", metavar="FILE", help="train.yaml (default: beside hosts.yaml)"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a setting over train.yaml; repeatable"),
]


def train_config(
    options: Options, place: "Place", train: Path | None, sets: list[str] | None
) -> "TrainConfig":
    """Read the configuration, and check it against the devices of the place.

    Raises: ConfigurationError.
    """
    from dflashctl.errors import ConfigurationError
    from dflashctl.gpu_roles import uses_gpus
    from dflashctl.train_file import read_train_config

    beside = options.inventory_path().parent / "train.yaml"
    if train is None and beside.is_file():
        train = beside
        say(f"using {beside}")
    on_gpus = uses_gpus(place.container)
    config = read_train_config(train, sets or [], () if on_gpus else ("run.device=cpu",))
    if not on_gpus and config.run.device != "cpu":
        raise ConfigurationError(
            f"run.device is {config.run.device}, and hosts.yaml gives {place.label} only cpu roles",
            hint="--set run.device=cpu, or GPUs in hosts.yaml",
        )
    return config


@contextmanager
def open_ways(options: Options, place: "Place") -> "Iterator[Ways]":
    """Open the way to a node and, over it, one into its container, entered once for all.

    The node goes on entering while the caller imports and prepares what it needs; the first
    command raises what failed.
    """
    from dflashctl.kept_way import KeptWay
    from dflashctl.transport import enter, way_to

    node = way_to(place.host, accept_new=options.accept_new)
    inside = enter(node, place)
    if inside is node:
        with closing(node):
            node.open()
            yield _ways(place, node, node)
        return
    with closing(node), closing(KeptWay(inside, place.container.python)) as kept:
        kept.enter()
        yield _ways(place, kept, node)


def _ways(place: "Place", inside: "Transport", node: "Transport") -> "Ways":
    from dflashctl.gpu_roles import Ways

    return Ways(place, inside, node)
