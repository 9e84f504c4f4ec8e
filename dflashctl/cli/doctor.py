"""The verb that looks for what is missing before anything is launched: doctor."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.output import say, show
from dflashctl.cli.verb import Options, Verb, current

if TYPE_CHECKING:
    from dflashctl.diagnosis import Check
    from dflashctl.inventory import Place
    from dflashctl.operations.doctor import DoctorRequest, DoctorResult


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("doctor", cls=Verb)(doctor)


def doctor(
    ctx: typer.Context,
    *,
    train: Annotated[
        Path | None,
        typer.Option("--train", metavar="FILE", help="train.yaml, for what its target needs"),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="make the safe fixes; asks before it installs")
    ] = False,
    nccl: Annotated[
        bool, typer.Option("--nccl", help="also let two GPUs of each place add numbers together")
    ] = False,
) -> None:
    """Check laptop, nodes and containers, and say what to type.

    Changes nothing without --fix; --nccl locks two idle GPUs meanwhile. Exit status 1 when a check
    FAILs.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.doctor import DoctorRequest, examine
    from dflashctl.render.doctor import doctor_document, doctor_text

    options = current(ctx)
    inventory = options.inventory()
    request = DoctorRequest(
        inventory=inventory.path,
        places=tuple(inventory.select(options.limits)),
        requirements_digest=build_bundle().requirements_digest,
        target=_target(train),
        accept_new=options.accept_new,
    )
    result = examine(request)
    if fix and _mend(options, request, result):
        result = examine(request)
    if nccl:
        result = result.with_more(
            [_add_together(options, place, request, result) for place in request.places]
        )
    show(options, doctor_document(result), doctor_text(result), ok=result.ok)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _target(train: Path | None) -> str | None:
    from dflashctl.train_file import read_train_config

    return None if train is None else read_train_config(train, [], ()).target.path


def _add_together(
    options: Options, place: "Place", request: "DoctorRequest", result: "DoctorResult"
) -> "Check":
    """Let two ranks of a place add numbers, unless what was found forbids it."""
    from dflashctl.cli.staging import open_ways
    from dflashctl.errors import DflashctlError
    from dflashctl.operations.nccl import add_together, obstacle, unable

    found = obstacle(place, result.checks)
    if found is not None:
        return found
    say(f"{place.label}: two ranks add numbers, which can take minutes")
    try:
        with open_ways(options, place) as ways:
            return add_together(ways, request.requirements_digest)
    except DflashctlError as error:
        return unable(place, error)


def _mend(options: Options, request: "DoctorRequest", result: "DoctorResult") -> bool:
    """Make the safe fixes; True when one was made."""
    from dflashctl.errors import DflashctlError
    from dflashctl.operations.doctor import asks_first, mend, mendable

    made = False
    for check in mendable(result):
        line = f"{check.place}: {' '.join(check.mend)}"
        if asks_first(check) and not options.yes:
            if not sys.stdin.isatty():
                say(f"not done without --yes: {line}")
                continue
            say(line)
            if not typer.confirm("do it?", err=True):
                continue
        say(f"fixing {line}")
        try:
            mend(check, request.places, accept_new=options.accept_new)
            made = True
        except DflashctlError as error:
            say(f"{error}; {error.hint}")
    return made
