"""The verbs before a launch: check, warmup, data doctor. They stage a run, and leave none."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dflashctl.cli.output import relay, say, show, tell_trips, warn_text
from dflashctl.cli.staging import Sets, TrainFile, open_ways, train_config
from dflashctl.cli.verb import Verb, Verbs, current


def register(app: typer.Typer) -> None:
    """Add the verbs to ``app``."""
    for verb in (check, warmup):
        app.command(verb.__name__, cls=Verb)(verb)
    data = typer.Typer(
        cls=Verbs,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="The data of a run to come.",
    )
    data.command("doctor", cls=Verb)(doctor)
    app.add_typer(data, name="data")


def check(
    ctx: typer.Context,
    train: TrainFile = None,
    sets: Sets = None,
    *,
    fast: Annotated[
        bool, typer.Option("--fast", help="seconds on the CPU, without the target's weights")
    ] = False,
) -> None:
    """Prove that what would be trained is what will be served.

    It loads the real target on the first target GPU; --fast is the part that launch runs.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.check import check as run
    from dflashctl.parity import CheckRequest
    from dflashctl.remote_run import Code
    from dflashctl.render.findings import check_text

    options = current(ctx)
    place = options.place()
    config = train_config(options, place, train, sets)
    request = CheckRequest(Code.of(build_bundle()), config, tuple(sys.argv), fast)
    if not fast:
        say("checking; the target is loaded first")
    with open_ways(options, place) as ways, relay() as on_output:
        result = run(ways, request, on_output)
    show(options, result, check_text(result), ok=result.check.ok)
    tell_trips(options, result.round_trips)
    if not result.check.ok:
        raise typer.Exit(7)


def warmup(
    ctx: typer.Context,
    train: TrainFile = None,
    sets: Sets = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save-artifacts", metavar="FILE", help="also keep the caches here, in a file"
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            "--load-artifacts", metavar="FILE", help="begin with such a file, from a host like it"
        ),
    ] = None,
) -> None:
    """Compile what a run needs, on each drafter GPU in turn.

    It goes into the cache that launch uses. Load only files that you saved: torch reads them as
    Python objects.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.warmup import Sinks, WarmupRequest, require_files, warm_up
    from dflashctl.remote_run import Code
    from dflashctl.render.counter import byte_counter
    from dflashctl.render.receipts import warmup_progress, warmup_text

    options = current(ctx)
    place = options.place()
    config = train_config(options, place, train, sets)
    request = WarmupRequest(Code.of(build_bundle()), config, tuple(sys.argv), load, save)
    require_files(request)

    def tell(report: dict[str, Any]) -> None:
        warn_text(warmup_progress(report))

    with open_ways(options, place) as ways, relay() as on_output:
        result = warm_up(ways, request, Sinks(on_output, tell, byte_counter(sys.stderr)))
    show(options, result, warmup_text(result))
    tell_trips(options, result.round_trips)


def doctor(
    ctx: typer.Context,
    train: TrainFile = None,
    sets: Sets = None,
    samples: Annotated[
        int, typer.Option(min=0, metavar="N", help="chats to ask the target about; 0: no GPU")
    ] = 32,
) -> None:
    """Report on data, plan, disk and memory before a launch.

    Tells mask fraction, lengths, thinking mix, on-policy score, steps, hours and GPU memory. Exit
    status 7 when something forbids the launch.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.data_doctor import DoctorRequest, look_at_data
    from dflashctl.remote_run import Code
    from dflashctl.render.receipts import doctor_document, doctor_text

    options = current(ctx)
    place = options.place()
    config = train_config(options, place, train, sets)
    request = DoctorRequest(Code.of(build_bundle()), config, tuple(sys.argv), samples)
    with open_ways(options, place) as ways, relay() as on_output:
        result = look_at_data(ways, request, on_output)
    show(options, doctor_document(result), doctor_text(result), ok=result.ok)
    tell_trips(options, result.round_trips)
    if not result.ok:
        raise typer.Exit(7)
