"""The verb that frees disk in the containers: runs gc."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.output import say, show
from dflashctl.cli.verb import Options, current
from dflashctl.errors import ExitCode

if TYPE_CHECKING:
    from dflashctl.operations.gc import GcResult


def collect_garbage(
    ctx: typer.Context,
    *,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            metavar="N",
            help="complete checkpoints of each ended run that stay, besides the best (default all)",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would go")] = False,
) -> int:
    """Remove what no run needs: releases, scratch of checks, half-written files, old checkpoints.

    Shows every path with its size and the reason, and asks. What a living run or its resume needs
    stays.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.gc import GcRequest, plan, remove
    from dflashctl.render.retention import gc_document, outcome_text, plan_text

    options = current(ctx)
    places = options.places()
    request = GcRequest(build_bundle().digest, keep)
    result = plan(places, options.connect, request)
    text = plan_text(result, verbose=bool(options.verbose))
    if dry_run or not any(one.items for one in result.plans):
        show(options, gc_document(result, dry_run=dry_run), text, ok=not result.failures)
        return _exit_status(options, result, len(places))
    if not options.json:
        show(options, {}, text)
    _confirm(options)
    result = remove(places, options.connect, request, result)
    show(
        options,
        gc_document(result, dry_run=False),
        outcome_text(result),
        ok=not result.failures,
    )
    return _exit_status(options, result, len(places))


def _confirm(options: Options) -> None:
    """Ask whether to remove. Raises: RefusedError without an answer, Exit for a no."""
    from dflashctl.errors import RefusedError

    if options.yes:
        return
    if options.json or not sys.stdin.isatty():
        raise RefusedError(
            "nothing was removed: nobody was asked",
            hint="--yes removes it, --dry-run only shows it",
            code="not-confirmed",
        )
    if not typer.confirm("remove it?", err=True):
        say("nothing was removed")
        raise typer.Exit(int(ExitCode.OK))


def _exit_status(options: Options, result: "GcResult", num_places: int) -> int:
    """Tell the places that failed: 6, or their own status when all failed alike."""
    from dflashctl.render.runs import failure_lines

    if not result.failures:
        return int(ExitCode.OK)
    if not options.json:
        say(failure_lines(result.failures).rstrip("\n"))
    codes = {failure.exit_code for failure in result.failures}
    everywhere = len({failure.place for failure in result.failures}) == num_places
    return codes.pop() if everywhere and len(codes) == 1 else int(ExitCode.PARTIAL)
