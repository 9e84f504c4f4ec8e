"""What every verb shares: the global options, accepted before and after the verb's name.

``Options`` is the one object behind them; a verb reads it with ``current(ctx)`` and asks it for the
inventory, a place or the run records.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from dflashctl.inventory import Host, Inventory, Place
    from dflashctl.run_store import RunStore
    from dflashctl.transport.base import Transport


_LOOK = "look with: dflashctl status"
_AFTER_INTERRUPTION = {
    "stop": f"; a run that was signalled writes its checkpoint and ends all the same; {_LOOK}",
    "launch": f"; the run may have started; {_LOOK}, or type the same launch again",
    "exec": "; the command may go on there",
    "deploy": "; type the same again, it completes what is missing",
    "push": "; type the same again, it completes what is missing",
    "pull": "; type the same again, it goes on where this one stopped",
    "gc": "; what was begun there may go on; type the same again for the rest",
}


@dataclass
class Options:
    """The global options; filled by the parser from wherever they stand on the command line."""

    config: Path | None = None
    limits: list[str] = field(default_factory=list)
    json: bool = False
    accept_new: bool = False
    debug: bool = False
    yes: bool = False
    verbose: int = 0
    runs_dir: Path | None = None

    def inventory_path(self) -> Path:
        """Return the hosts.yaml in force; raises UsageError when there is none."""
        import os

        from dflashctl.inventory import find_inventory

        return find_inventory(self.config, Path.cwd(), os.environ)

    def inventory(self) -> "Inventory":
        """Read the hosts.yaml in force."""
        from dflashctl.inventory import load_inventory

        return load_inventory(self.inventory_path())

    def place(self) -> "Place":
        """Return the one container that --limit names; raises UsageError naming the choices."""
        return self.inventory().one(self.limits)

    def places(self) -> "list[Place]":
        """Return every container that --limit names; all without --limit."""
        return self.inventory().select(self.limits)

    def runs(self) -> "RunStore":
        """Return the run records: --runs-dir, else ``runs/`` beside hosts.yaml."""
        from dflashctl.run_store import RunStore

        return RunStore(self.runs_dir or self.inventory_path().parent / "runs")

    def place_of(self, tag: str) -> "Place":
        """Return where the run ``tag`` lives: --limit, else its record, else the only container.

        Raises: UsageError.
        """
        inventory = self.inventory()
        if not self.limits:
            recorded = self.runs().place_of(tag)
            if recorded is not None:
                return inventory.one([recorded])
            if len(inventory.places) > 1:
                from dflashctl.errors import UsageError

                raise UsageError(
                    f"no run {tag} is recorded here, and {len(inventory.places)} containers may"
                    f" hold it: {', '.join(place.label for place in inventory.places)}",
                    hint=f"dflashctl runs list; then name its own: --limit"
                    f" {inventory.places[0].label}",
                )
        return inventory.one(self.limits)

    def connect(self, place: "Place") -> "Transport":
        """Open the way into ``place``."""
        from dflashctl.transport import connect

        return connect(place, accept_new=self.accept_new)

    def reach(self, host: "Host") -> "Transport":
        """Return the way to a node, not opened yet."""
        from dflashctl.transport import way_to

        return way_to(host, accept_new=self.accept_new)


def current(ctx: typer.Context) -> Options:
    """Return the options of this invocation."""
    return ctx.find_root().ensure_object(Options)


def finite_seconds(value: float | None) -> float | None:
    """Refuse nan, inf and negative seconds; the callback of options that are waits."""
    if value is not None and not (0 <= value < float("inf")):
        raise typer.BadParameter(f"{value} is no number of seconds to wait")
    return value


def parse_duration(text: str | None) -> float:
    """Return the seconds of 2h, 90m, 1h30m, 45s or 45; None is 0. Raises: typer.BadParameter."""
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    if text is None:
        return 0.0
    whole = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not text or whole is None:
        raise typer.BadParameter(f"{text} is no number of seconds, nor 10m, 2h or 1h30m")
    pairs = zip(units.values(), whole.groups(), strict=True)
    return sum(seconds * int(number) for seconds, number in pairs if number)


def _store(name: str) -> Any:
    def callback(ctx: Any, _param: Any, value: Any) -> Any:
        if value:
            options = ctx.find_root().ensure_object(Options)
            old = getattr(options, name)
            merged = [*old, *value] if isinstance(old, list) else value
            setattr(options, name, Path(value) if name in ("config", "runs_dir") else merged)
        return value

    return callback


def _option(name: str, *declarations: str, help: str, **extra: Any) -> TyperOption:
    return TyperOption(
        param_decls=[*declarations, f"global_{name}"],
        expose_value=False,
        callback=_store(name),
        help=help,
        **extra,
    )


def shared_options() -> list[TyperOption]:
    """Make the global options anew: a parameter object belongs to one command."""
    return [
        _option("config", "--config", help="hosts.yaml to use", metavar="FILE", type=str),
        _option(
            "limits",
            *("--limit", "-l", "--host"),
            help="host, host/vmid, group or glob; repeatable",
            metavar="NAME",
            type=str,
            multiple=True,
        ),
        _option("json", "--json", help="one JSON document on stdout", is_flag=True),
        _option("accept_new", "--accept-new", help="trust unknown host keys", is_flag=True),
        _option("yes", "--yes", "-y", help="answer yes", is_flag=True, envvar="DFLASHCTL_YES"),
        _option("debug", "--debug", help="show the traceback of an error", is_flag=True),
        _option("verbose", "--verbose", "-v", help="say more", type=int, count=True),
        _option(
            "runs_dir", "--runs-dir", help="run records (default: beside hosts.yaml)",
            metavar="DIR", type=str,
        ),
    ]  # fmt: skip


class Verb(TyperCommand):
    """A command that also takes the global options, and tells an interruption."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; after Ctrl-C say what may go on: typer itself ends with 130 in silence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            # Who was interrupted may know better what goes on than its verb does.
            after = str(interruption) or _AFTER_INTERRUPTION.get(self.name or "", "")
            sys.stderr.write(f"interrupted{after}\n")
            raise


class Verbs(TyperGroup):
    """A group of commands that also takes the global options, before the verb."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.params.extend(shared_options())
