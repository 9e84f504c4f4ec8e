"""The verbs that act, from init to attach: each changes something, or takes GPUs."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.output import relay, say, show, show_text, tell_trips
from dflashctl.cli.staging import Sets, TrainFile, open_ways, train_config
from dflashctl.cli.verb import Options, Verb, current, finite_seconds, parse_duration

if TYPE_CHECKING:
    from dflashctl.errors import DflashctlError
    from dflashctl.run_store import RunStore

Tag = Annotated[str, typer.Argument(metavar="TAG", help="the run")]
Best = Annotated[bool, typer.Option("--best", help="the checkpoint that evaluations found best")]
Ema = Annotated[bool, typer.Option("--ema", help="the average of the weights")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would change")]


def register(app: typer.Typer) -> None:
    """Add the acting verbs to ``app``."""
    for verb in (init, deploy, push, gpus, launch, stop, evaluate, export, attach):
        app.command(verb.__name__, cls=Verb)(verb)


def init(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(help="where to write hosts.yaml")] = Path(),
) -> None:
    """Write a commented hosts.yaml to start from."""
    from dflashctl.operations.init import init as write

    result = write(directory / "hosts.yaml")
    text = f"wrote {result.path}; edit it, then: dflashctl doctor\n"
    show(current(ctx), result, text)


def deploy(
    ctx: typer.Context,
    *,
    env: Annotated[bool, typer.Option("--env", help="set up the Python environment too")] = False,
    requirements: Annotated[
        Path | None, typer.Option(metavar="FILE", help="instead of the trainer's own")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Send the trainer's code to containers that do not have it."""
    from dflashctl.errors import DflashctlError

    options = current(ctx)
    places, request = options.places(), None
    results, failures = [], []
    for place in places:
        try:
            with open_ways(options, place) as ways, relay() as on_output:
                from dflashctl.bundle import build_bundle
                from dflashctl.operations.deploy import DeployRequest
                from dflashctl.operations.deploy import deploy as run
                from dflashctl.render.receipts import deploy_text

                request = request or DeployRequest(
                    build_bundle(), env or bool(requirements), requirements, dry_run
                )
                result = run(ways.inside, place, request, on_output)
        except DflashctlError as error:
            if len(places) == 1:
                raise
            failures.append(error)  # the other containers get theirs
            continue
        results.append(result)
        if not options.json:
            show_text(deploy_text(result))
        tell_trips(options, result.round_trips)
    if options.json:
        from dflashctl.render.document import print_document
        from dflashctl.render.receipts import deploy_document

        print_document(deploy_document(results, failures), ok=not failures)
    _end_with(failures, len(places), quiet=options.json)


def push(
    ctx: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="LOCAL... REMOTE_DIR")],
    *,
    dry_run: DryRun = False,
) -> None:
    """Send files or directories, such as a data set, to a container."""
    from dflashctl.errors import UsageError

    options = current(ctx)
    if len(paths) < 2:
        raise UsageError(
            "expected one or more local paths and the remote directory",
            hint="dflashctl push chats.jsonl /workspace/data",
        )
    with open_ways(options, options.place()) as ways:
        from dflashctl.operations.push import push as run
        from dflashctl.render.receipts import push_text

        result = run(ways.inside, paths[:-1], str(paths[-1]), dry_run=dry_run)
    show(options, result, push_text(result))
    tell_trips(options, result.round_trips)


def gpus(
    ctx: typer.Context,
    watch: Annotated[
        float | None,
        typer.Option(
            *("--watch", "-w"),
            metavar="SECONDS",
            min=0.5,
            callback=finite_seconds,
            help="repeat",
        ),
    ] = None,
) -> None:
    """Show memory, utilisation and holder of every GPU, host by host."""
    from dataclasses import asdict

    from dflashctl.operations.gpus import look_at_gpus
    from dflashctl.render.gpus import gpus_text

    options = current(ctx)
    places, inside = options.places(), True
    while True:
        hosts = look_at_gpus(places, accept_new=options.accept_new, inside=inside)
        inside = False  # pct costs a node a second of a core: with --watch only the first time
        failed = [host for host in hosts if host.exit_code]
        if watch and sys.stdout.isatty() and not options.json:
            sys.stdout.write("\x1b[H\x1b[J")
        document = {"hosts": [asdict(host) for host in hosts]}
        show(options, document, gpus_text(hosts), ok=not failed)
        if watch is None:
            break
        time.sleep(watch)
    for host in failed:
        say(f"error: {host.host}: {host.error}")
        if host.hint:
            say(f"  hint: {host.hint}")
    if failed:
        partial = len(failed) < len(hosts)
        raise typer.Exit(6 if partial else max(host.exit_code for host in failed))


def launch(  # noqa: PLR0913 - the options of a verb are its parameters
    ctx: typer.Context,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="TAG", help="name of the new run")
    ] = None,
    train: TrainFile = None,
    sets: Sets = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="TAG", help="go on with a run that ended")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(metavar="2h", help="wait so long for GPUs to be free (s, m, h or d)"),
    ] = None,
    *,
    look: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", callback=finite_seconds, help="longest wait for the first event"
        ),
    ] = 10.0,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="start without the check; the manifest says so")
    ] = False,
    require_warm: Annotated[
        bool, typer.Option("--require-warm", help="refuse a warm-up that is stale or missing")
    ] = False,
) -> None:
    """Check the run, start it in tmux, and look again whether it lives."""
    options, wait_s = current(ctx), parse_duration(wait)
    if resume is not None:
        if tag or train or sets or skip_check or require_warm:
            from dflashctl.errors import UsageError

            raise UsageError(
                "--resume takes the run's own settings: no --tag, --train, --set, --skip-check or"
                " --require-warm",
                hint=f"dflashctl launch --resume {resume}; other settings are another run: --tag",
            )
        result = _resume(options, resume, (look, wait_s))
    else:
        strict = (skip_check, require_warm)
        result = _launch(options, tag, (train, sets), (look, wait_s), strict)
    from dflashctl.render.receipts import launch_text

    show(options, result, launch_text(result))
    tell_trips(options, result.round_trips)


def _launch(
    options: Options,
    tag: str | None,
    settings: tuple[Path | None, list[str] | None],
    waits: tuple[float, float],
    strict: tuple[bool, bool],
) -> Any:
    place, runs = options.place(), options.runs()
    tag = tag or _propose_tag(options, runs)
    runs.require_new(tag, place.label)  # before any connection is made
    with open_ways(options, place) as ways:
        from dflashctl.bundle import build_bundle
        from dflashctl.operations.launch import LaunchRequest
        from dflashctl.operations.launch import launch as run
        from dflashctl.remote_run import Code

        config = train_config(options, place, *settings)
        code = Code.of(build_bundle())
        look_s, wait_s = waits
        skip_check, require_warm = strict
        request = LaunchRequest(
            tag, code, config, tuple(sys.argv), look_s, skip_check, wait_s, require_warm
        )
        return run(ways, request, runs, say)


def _resume(options: Options, tag: str, waits: tuple[float, float]) -> Any:
    with open_ways(options, options.place_of(tag)) as ways:
        from dflashctl.operations.launch import ResumeRequest
        from dflashctl.operations.launch import resume as run

        return run(ways, ResumeRequest(tag, *waits), options.runs(), say)


def stop(
    ctx: typer.Context,
    tag: Tag,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=finite_seconds, help="time for the checkpoint"),
    ] = 60.0,
) -> None:
    """Stop a run with a checkpoint, and say what was proven."""
    from trainer.contract.layout import Workspace

    options = current(ctx)
    place = options.place_of(tag)
    layout = Workspace.at(place.container.workspace).run(tag)
    token = options.runs().token(tag)
    with open_ways(options, place) as ways:
        from dflashctl.operations.stop import StopRequest
        from dflashctl.operations.stop import stop as run
        from dflashctl.render.receipts import stop_document, stop_text

        request = StopRequest(place.container, layout, grace, token)
        result = run(ways.inside, ways.node, request, say)
    show(options, stop_document(result), stop_text(result), ok=result.clean)
    if not result.clean:
        raise typer.Exit(1)


def evaluate(  # noqa: PLR0913 - the options of a verb are its parameters
    ctx: typer.Context,
    tag: Tag,
    *,
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE", help="JSONL of chats, here or there")
    ],
    num_prompts: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="decode only the first N")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="longest answer")
    ] = None,
    walk_prompts: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="prompts of the cheap estimate")
    ] = None,
    target_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32 makes the check exact")
    ] = None,
    best: Best = False,
    ema: Ema = False,
) -> None:
    """Measure the acceptance length by decoding in the container."""
    from dflashctl.operations.evaluate import EvaluateRequest
    from dflashctl.operations.evaluate import evaluate as run
    from dflashctl.render.receipts import evaluate_text

    options = current(ctx)
    given = {
        "--num-prompts": num_prompts,
        "--max-new-tokens": max_new_tokens,
        "--walk-prompts": walk_prompts,
        "--target-dtype": target_dtype,
    }
    words = [str(w) for pair in given.items() if pair[1] is not None for w in pair]
    words += _weights(best=best, ema=ema)
    with open_ways(options, options.place_of(tag)) as ways, relay() as on_output:
        result = run(ways, EvaluateRequest(tag, prompts, words), on_output)
    show(options, result, evaluate_text(result))
    tell_trips(options, result.round_trips)


def export(ctx: typer.Context, tag: Tag, *, best: Best = False, ema: Ema = False) -> None:
    """Write the draft of the last checkpoint in the z-lab layout."""
    from dflashctl.operations.export import export as run
    from trainer.contract.layout import Workspace

    options = current(ctx)
    place = options.place_of(tag)
    layout = Workspace.at(place.container.workspace).run(tag)
    with closing(options.connect(place)) as transport, relay() as on_output:
        result = run(transport, layout, on_output, _weights(best=best, ema=ema))
    text = f"{place.label}  {tag} exported to {result.directory}\n  next: dflashctl pull {tag}\n"
    show(options, result, text)


def attach(ctx: typer.Context, tag: Tag) -> None:
    """Attach to the run's own terminal (leave it with Ctrl-b d)."""
    from dflashctl.operations.attach import attach as run
    from trainer.contract.layout import Workspace

    options = current(ctx)
    place = options.place_of(tag)
    layout = Workspace.at(place.container.workspace).run(tag)
    with closing(options.connect(place)) as transport:
        run(transport, layout)


def _weights(*, best: bool, ema: bool) -> list[str]:
    """Return the trainer's words for the choice of weights."""
    return [word for word, given in (("--best", best), ("--ema", ema)) if given]


def _propose_tag(options: Options, runs: "RunStore") -> str:
    from dflashctl.errors import UsageError
    from trainer.contract.layout import next_tag

    tag = next_tag(runs.tags())
    if options.yes:
        say(f"tag {tag}")
        return tag
    if not sys.stdin.isatty():
        raise UsageError("no tag was given", hint=f"dflashctl launch --tag {tag}")
    answer: str = typer.prompt("tag", default=tag, err=True)
    return answer


def _end_with(failures: "list[DflashctlError]", num_asked: int, *, quiet: bool) -> None:
    """Tell the failures of a fan-out and leave: 6 when some succeeded, else the worst code."""
    from dflashctl.errors import ExitCode
    from dflashctl.render.failure import failure_text

    if not failures:
        return
    if not quiet:
        sys.stderr.write("".join(failure_text(error) for error in failures))
    worst = max(error.exit_code for error in failures)
    raise typer.Exit(int(ExitCode.PARTIAL if len(failures) < num_asked else worst))
