"""The verbs that act, from init to attach: each changes something, or takes GPUs."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashctl.cli.verb import Options, Verb, current, finite_seconds

if TYPE_CHECKING:
    from dflashctl.errors import DflashctlError
    from dflashctl.gpu_roles import Ways
    from dflashctl.inventory import Place
    from dflashctl.run_store import RunStore
    from trainer.contract.config import TrainConfig

Tag = Annotated[str, typer.Argument(metavar="TAG", help="the run")]
Best = Annotated[bool, typer.Option("--best", help="the checkpoint that evaluations found best")]
Ema = Annotated[bool, typer.Option("--ema", help="the average of the weights")]
TrainFile = Annotated[
    Path | None,
    typer.Option("--train", metavar="FILE", help="train.yaml (default: beside hosts.yaml)"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a setting over train.yaml; repeatable"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would change")]


def register(app: typer.Typer) -> None:
    """Add the acting verbs to ``app``."""
    for verb in (init, deploy, push, gpus, check, warmup, launch, stop, evaluate, export, attach):
        app.command(verb.__name__, cls=Verb)(verb)


def init(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(help="where to write hosts.yaml")] = Path(),
) -> None:
    """Write a commented hosts.yaml to start from."""
    from dflashctl.operations.init import init as write

    result = write(directory / "hosts.yaml")
    text = f"wrote {result.path}; edit it, then: dflashctl gpus\n"
    _show(current(ctx), result, text)


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
    from dflashctl.bundle import build_bundle
    from dflashctl.errors import DflashctlError
    from dflashctl.operations.deploy import DeployRequest
    from dflashctl.operations.deploy import deploy as run
    from dflashctl.render.document import print_document
    from dflashctl.render.receipts import deploy_document, deploy_text

    options = current(ctx)
    request = DeployRequest(build_bundle(), env or bool(requirements), requirements, dry_run)
    places = options.places()
    results, failures = [], []
    for place in places:
        try:
            with closing(options.connect(place)) as transport:
                result = run(transport, place, request, _to_stderr)
        except DflashctlError as error:
            if len(places) == 1:
                raise
            failures.append(error)  # the other containers get theirs
            continue
        results.append(result)
        if not options.json:
            sys.stdout.write(deploy_text(result))
        _tell_trips(options, result.round_trips)
    if options.json:
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
    from dflashctl.operations.push import push as run
    from dflashctl.render.receipts import push_text

    options = current(ctx)
    if len(paths) < 2:
        raise UsageError(
            "expected one or more local paths and the remote directory",
            hint="dflashctl push chats.jsonl /workspace/data",
        )
    with closing(options.connect(options.place())) as transport:
        result = run(transport, paths[:-1], str(paths[-1]), dry_run=dry_run)
    _show(options, result, push_text(result))
    _tell_trips(options, result.round_trips)


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
    from dflashctl.render.receipts import gpus_text

    options = current(ctx)
    places = options.places()
    while True:
        hosts = look_at_gpus(places, accept_new=options.accept_new)
        failed = [host for host in hosts if host.exit_code]
        clear = "\x1b[H\x1b[J" if watch and sys.stdout.isatty() and not options.json else ""
        text = clear + gpus_text(hosts)
        _show(options, {"hosts": [asdict(host) for host in hosts]}, text, ok=not failed)
        if watch is None:
            break
        time.sleep(watch)
    for host in failed:
        sys.stderr.write(f"error: {host.host}: {host.error}\n")
        if host.hint:
            sys.stderr.write(f"  hint: {host.hint}\n")
    if failed:
        partial = len(failed) < len(hosts)
        raise typer.Exit(6 if partial else max(host.exit_code for host in failed))


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
    config = _train_config(options, place, train, sets)
    request = CheckRequest(Code.of(build_bundle()), config, tuple(sys.argv), fast)
    if not fast:
        _say("checking; the target is loaded first")
    with _ways(options, place) as ways:
        result = run(ways, request, _to_stderr)
    _show(options, result, check_text(result), ok=result.check.ok)
    _tell_trips(options, result.round_trips)
    if not result.check.ok:
        raise typer.Exit(7)


def warmup(ctx: typer.Context, train: TrainFile = None, sets: Sets = None) -> None:
    """Compile what a run needs, on each drafter GPU in turn.

    It goes into the cache that launch uses.
    """
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.warmup import warm_up
    from dflashctl.remote_run import Code
    from dflashctl.render.receipts import warmup_progress, warmup_text

    options = current(ctx)
    place = options.place()
    config = _train_config(options, place, train, sets)
    code = Code.of(build_bundle())

    def tell(report: dict[str, Any]) -> None:
        sys.stderr.write(warmup_progress(report))

    with _ways(options, place) as ways:
        result = warm_up(ways, code, config, tuple(sys.argv), _to_stderr, tell)
    _show(options, result, warmup_text(result))
    _tell_trips(options, result.round_trips)


def launch(  # noqa: PLR0913 - the options of a verb are its parameters
    ctx: typer.Context,
    tag: Annotated[str | None, typer.Option("--tag", help="name of the new run")] = None,
    train: TrainFile = None,
    sets: Sets = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="TAG", help="go on with a run that ended")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", callback=finite_seconds, help="longest wait for the first event"
        ),
    ] = 10.0,
    *,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="start without the check; the manifest says so")
    ] = False,
) -> None:
    """Check the run, start it in tmux, and look again whether it lives."""
    from dflashctl.errors import UsageError
    from dflashctl.render.receipts import launch_text

    options = current(ctx)
    if resume is not None:
        if tag or train or sets or skip_check:
            raise UsageError(
                "--resume takes the run's own settings: no --tag, --train, --set or --skip-check",
                hint=f"dflashctl launch --resume {resume}",
            )
        result = _resume(options, resume, wait)
    else:
        result = _launch(options, tag, (train, sets), wait, skip_check=skip_check)
    _show(options, result, launch_text(result))
    _tell_trips(options, result.round_trips)


def _launch(
    options: Options,
    tag: str | None,
    settings: tuple[Path | None, list[str] | None],
    wait: float,
    *,
    skip_check: bool,
) -> Any:
    from dflashctl.bundle import build_bundle
    from dflashctl.operations.launch import LaunchRequest, refuse_recorded
    from dflashctl.operations.launch import launch as run
    from dflashctl.remote_run import Code

    place, runs = options.place(), options.runs()
    tag = tag or _propose_tag(options, runs)
    config = _train_config(options, place, *settings)
    code = Code.of(build_bundle())
    request = LaunchRequest(tag, code, config, tuple(sys.argv), wait, skip_check)
    refuse_recorded(runs, tag, place.label)  # before any connection is made
    with _ways(options, place) as ways:
        return run(ways, request, runs, _say)


def _resume(options: Options, tag: str, wait: float) -> Any:
    from dflashctl.operations.launch import resume as run

    with _ways(options, options.place_of(tag)) as ways:
        return run(ways, tag, options.runs(), _say, wait_s=wait)


def stop(
    ctx: typer.Context,
    tag: Tag,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=finite_seconds, help="time for the checkpoint"),
    ] = 60.0,
) -> None:
    """Stop a run with a checkpoint, and say what was proven."""
    from dflashctl.operations.stop import stop as run
    from dflashctl.render.receipts import stop_text
    from trainer.contract.layout import Workspace

    options = current(ctx)
    place = options.place_of(tag)
    layout = Workspace.at(place.container.workspace).run(tag)
    with _ways(options, place) as ways:
        result = run(ways.inside, ways.node, layout, grace, _say)
    _show(options, result, stop_text(result), ok=result.clean)
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
    with _ways(options, options.place_of(tag)) as ways:
        result = run(ways, EvaluateRequest(tag, prompts, words), _to_stderr)
    _show(options, result, evaluate_text(result))
    _tell_trips(options, result.round_trips)


def export(ctx: typer.Context, tag: Tag, *, best: Best = False, ema: Ema = False) -> None:
    """Write the draft of the last checkpoint in the z-lab layout."""
    from dflashctl.operations.export import export as run
    from trainer.contract.layout import Workspace

    options = current(ctx)
    place = options.place_of(tag)
    layout = Workspace.at(place.container.workspace).run(tag)
    with closing(options.connect(place)) as transport:
        result = run(transport, layout, _to_stderr, _weights(best=best, ema=ema))
    text = f"{place.label}  {tag} exported to {result.directory}\n  next: dflashctl pull {tag}\n"
    _show(options, result, text)


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


def _train_config(
    options: Options, place: "Place", train: Path | None, sets: list[str] | None
) -> "TrainConfig":
    """Read the configuration, and check it against the devices of the place."""
    from dflashctl.errors import ConfigurationError
    from dflashctl.gpu_roles import uses_gpus
    from dflashctl.train_file import read_train_config

    beside = options.inventory_path().parent / "train.yaml"
    if train is None and beside.is_file():
        train = beside
        _say(f"using {beside}")
    on_gpus = uses_gpus(place.container)
    config = read_train_config(train, sets or [], () if on_gpus else ("run.device=cpu",))
    if not on_gpus and config.run.device != "cpu":
        raise ConfigurationError(
            f"run.device is {config.run.device}, and hosts.yaml gives {place.label} only cpu roles",
            hint="--set run.device=cpu, or GPUs in hosts.yaml",
        )
    return config


def _propose_tag(options: Options, runs: "RunStore") -> str:
    from dflashctl.errors import UsageError
    from trainer.contract.layout import next_tag

    tag = next_tag(runs.tags())
    if options.yes:
        _say(f"tag {tag}")
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


@contextmanager
def _ways(options: Options, place: "Place") -> "Iterator[Ways]":
    """Open the way into the container, and the way to its node."""
    from dflashctl.gpu_roles import Ways
    from dflashctl.transport import connect_host

    with closing(options.connect(place)) as inside:
        if place.container.vmid is None:
            yield Ways(place, inside, inside)
            return
        with closing(connect_host(place.host, accept_new=options.accept_new)) as node:
            yield Ways(place, inside, node)


def _show(options: Options, result: Any, text: str, *, ok: bool = True) -> None:
    if options.json:
        from dflashctl.render.document import print_document

        print_document(result, ok=ok)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _to_stderr(data: bytes) -> None:
    sys.stderr.buffer.write(data)
    sys.stderr.buffer.flush()


def _tell_trips(options: Options, round_trips: int) -> None:
    if options.verbose:
        _say(f"{round_trips} round trip{'' if round_trips == 1 else 's'}")
