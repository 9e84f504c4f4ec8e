"""The verbs about the locks on GPUs: locks list, locks clear."""

from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.output import show, warn_text
from dflashctl.cli.verb import Options, Verb, Verbs, current

if TYPE_CHECKING:
    from dflashctl.operations.locks import LocksResult


def register(app: typer.Typer) -> None:
    """Add the verbs to ``app``."""
    group = typer.Typer(
        cls=Verbs,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="The locks that launches hold on GPUs.",
    )
    group.command("list", cls=Verb)(list_locks)
    group.command("clear", cls=Verb)(clear)
    app.add_typer(group, name="locks")


def list_locks(ctx: typer.Context) -> None:
    """List the locks of every host: which run, whose, since when, and whether it lives."""
    from dflashctl.operations.locks import list_all
    from dflashctl.render.gpus import locks_document, locks_text

    options = current(ctx)
    result = list_all(options.places(), accept_new=options.accept_new)
    text = locks_text(result.locks)
    show(options, locks_document(result), text, ok=not result.failures)
    _end(options, result)


def clear(
    ctx: typer.Context,
    select: Annotated[str, typer.Argument(metavar="TAG|UUID", help="whose locks, or which GPU")],
    *,
    force: Annotated[bool, typer.Option("--force", help="even that of a run that lives")] = False,
) -> None:
    """Remove locks; one whose run lives or may start is refused without --force."""
    from dflashctl.operations.locks import clear_some
    from dflashctl.render.gpus import cleared_text, locks_document

    options = current(ctx)
    places, trust = options.places(), options.accept_new
    result = clear_some(places, select, force=force, accept_new=trust)
    text = cleared_text(result.locks)
    show(options, locks_document(result), text, ok=not result.failures)
    _end(options, result)


def _end(options: Options, result: "LocksResult") -> None:
    """Tell the hosts that gave no answer: 6 when others did, else the worst status."""
    from dflashctl.render.runs import failure_lines

    if not result.failures:
        return
    if not options.json:
        warn_text(failure_lines(result.failures))
    hosts = {place.host.name for place in options.places()}
    worst = max(failure.exit_code for failure in result.failures)
    raise typer.Exit(6 if len(result.failures) < len(hosts) else worst)
