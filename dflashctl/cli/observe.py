"""The verbs that look: watch, logs, status, runs list, pull."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.output import say, show_text, warn_text
from dflashctl.cli.retention import collect_garbage
from dflashctl.cli.verb import Options, Verb, Verbs, current
from dflashctl.errors import ExitCode

if TYPE_CHECKING:
    from dflashctl.event_stream import Ended, Notice
    from dflashctl.inventory import Place
    from dflashctl.operations.watch import Landings, WatchRequest
    from dflashctl.run_status import PlaceFailure

Tag = Annotated[str, typer.Argument(help="tag of the run", metavar="TAG")]
MaybeTag = Annotated[str | None, typer.Argument(help="tag of the run", metavar="[TAG]")]


def watch(ctx: typer.Context, tag: MaybeTag = None) -> int:
    """Watch a run live until it ends; the newest without TAG.

    Ctrl-C leaves the run alone. Exit status: 0 for a run that finished or was stopped, else 1.
    """
    from dflashctl.operations.watch import WatchRequest

    options = current(ctx)
    place, tag = _newest(options) if tag is None else (_locate(options, tag), tag)
    request = WatchRequest(place, tag, whole=options.json)
    show = _watch_live
    if options.json:
        show = _watch_json
    elif not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        show = _watch_plain
    try:
        ended = show(options, request)
    except KeyboardInterrupt:
        return _left_alone(tag)
    return _outcome_exit(ended)


def logs(
    ctx: typer.Context,
    tag: Tag,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the end")] = False,
    num_lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, metavar="N", help="only the last lines")
    ] = None,
) -> int:
    """Print the log of a run, byte for byte.

    On a terminal escape sequences are left out. With -f a run that failed makes it exit 1.
    """
    from dflashctl.operations.logs import LogsRequest
    from dflashctl.operations.logs import logs as read_logs
    from dflashctl.render.log import log_writer
    from dflashctl.render.runs import outcome

    options = current(ctx)
    request = LogsRequest(_locate(options, tag), tag, num_lines, follow)
    write = log_writer(sys.stdout)
    try:
        ended = read_logs(request, options.connect, write, _tell)
    except KeyboardInterrupt:
        return _left_alone(tag)
    if ended is None:
        return int(ExitCode.OK)
    record = None if ended.record is None else vars(ended.record)
    say(f"run {tag} {outcome(ended.state, record)}")
    return _outcome_exit(ended)


def status(ctx: typer.Context, tag: MaybeTag = None) -> int:
    """Show the runs of every container, or one TAG, as they are now.

    A run that failed makes it exit 1.
    """
    from dflashctl.operations.status import status as ask
    from dflashctl.render.document import print_document
    from dflashctl.render.runs import NO_ANSWER, NO_RUNS, status_lines, status_table

    options = current(ctx)
    places = options.places() if tag is None else [_locate(options, tag)]
    found = ask(places, options.reach, tag)
    failed = tag is not None and any(run.has_failed for run in found.runs)
    if options.json:
        print_document(found, ok=not found.failures and not failed)
    elif tag is not None:
        show_text("\n".join(status_lines(run) for run in found.runs))
    else:
        none = NO_ANSWER if found.failures else NO_RUNS
        show_text(status_table(found.runs) if found.runs else none)
    return _failure_exit(found.failures, len(places), quiet=options.json) or int(failed)


def list_runs(
    ctx: typer.Context,
    *,
    local: Annotated[bool, typer.Option("--local", help="ask no container")] = False,
) -> int:
    """List the runs known here or in the containers, oldest first."""
    from dflashctl.operations.runs import list_runs as merge
    from dflashctl.render.document import print_document
    from dflashctl.render.runs import NO_ANSWER, NO_RUNS, runs_table

    options = current(ctx)
    places = [] if local else options.places()
    found = merge(options.runs(), places, None if local else options.reach)
    if options.json:
        print_document(found, ok=not found.failures)
    else:
        none = NO_ANSWER if found.failures else NO_RUNS
        show_text(runs_table(found.runs) if found.runs else none)
    return _failure_exit(found.failures, len(places), quiet=options.json)


def pull(
    ctx: typer.Context,
    tag: Tag,
    *,
    what: Annotated[
        str, typer.Option("--what", help="some of logs,metrics,export,checkpoints", metavar="KINDS")
    ] = "logs,metrics,export",
    max_gib: Annotated[
        int, typer.Option("--max-gib", min=1, metavar="GIB", help="refuse more than this")
    ] = 64,
) -> int:
    """Bring the files of a run to runs/TAG, each checked by sha256.

    Run again after a break, it goes on.
    """
    from dflashctl.operations.pull import PullRequest
    from dflashctl.operations.pull import pull as bring
    from dflashctl.render.counter import byte_counter
    from dflashctl.render.document import print_document
    from dflashctl.render.tables import size

    options = current(ctx)
    kinds = [kind.strip() for kind in what.split(",") if kind.strip()]
    place, directory = _locate(options, tag), options.runs().directory(tag)
    request = PullRequest(place, tag, kinds, directory, max_gib << 30)
    result = bring(request, options.connect, byte_counter(sys.stderr))
    if options.json:
        print_document(result)
    else:
        names = "".join(f"  {name}\n" for name in result.received)
        came = f"{len(result.received)} files, {size(result.received_bytes)}"
        unchanged = f"{len(result.unchanged)} unchanged"
        show_text(f"{names}{came}; {unchanged}; in {result.directory}\n")
    return 0


def register(app: typer.Typer) -> None:
    """Add the observing verbs to ``app``."""
    for verb in (watch, logs, status, pull):
        app.command(cls=Verb)(verb)
    runs = typer.Typer(cls=Verbs, help="List runs; free the disk they fill.", no_args_is_help=True)
    runs.command("list", cls=Verb)(list_runs)
    runs.command("gc", cls=Verb)(collect_garbage)
    app.add_typer(runs, name="runs")


def _locate(options: Options, tag: str) -> "Place":
    """Return the container of ``tag``: by record or --limit, else by asking all of them."""
    from dflashctl.run_status import find_run

    if options.limits or options.runs().place_of(tag) is not None:
        return options.place_of(tag)
    return find_run(options.places(), options.reach, tag)


def _newest(options: Options) -> "tuple[Place, str]":
    """Return the run to watch without a tag: the newest record, else the only one that runs."""
    from dflashctl.run_status import find_running

    tags = options.runs().tags()
    if tags and not options.limits:
        return options.place_of(tags[-1]), tags[-1]
    return find_running(options.places(), options.reach)


def _watch_live(options: Options, request: "WatchRequest") -> "Ended":
    from dflashctl.operations.watch import watch as follow_run
    from dflashctl.render.live import LiveWatch
    from dflashctl.render.plain import receipt
    from dflashctl.run_view import RunView

    # Else SIGTERM would leave the terminal on the alternate screen without a cursor.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    view = RunView(request.tag, request.place.label)
    with LiveWatch(view) as screen:
        ended = follow_run(
            request,
            options.connect,
            lambda item: screen.take(item, time.monotonic()),
            _landings(options, request),
        )
    show_text(receipt(view))
    return ended


def _watch_plain(options: Options, request: "WatchRequest") -> "Ended":
    from dflashctl.operations.watch import watch as follow_run
    from dflashctl.render.plain import PlainWatch, receipt
    from dflashctl.run_view import RunView

    view = RunView(request.tag, request.place.label)
    lines = PlainWatch(view, show_text, warn_text)
    ended = follow_run(
        request,
        options.connect,
        lambda item: lines.take(item, time.monotonic()),
        _landings(options, request),
    )
    show_text(receipt(view))
    return ended


def _watch_json(options: Options, request: "WatchRequest") -> "Ended":
    from dflashctl.event_stream import Item
    from dflashctl.operations.watch import watch as follow_run
    from dflashctl.render.plain import stream_line

    def write(item: Item) -> None:
        line = stream_line(item)
        if line is not None:
            typer.echo(line, nl=False)

    return follow_run(request, options.connect, write, _landings(options, request))


def _landings(options: Options, request: "WatchRequest") -> "Landings":
    """Return how to look whether the run holds its own GPUs."""
    from contextlib import suppress

    from dflashctl.operations.watch import Landings
    from dflashctl.transport import connect_host
    from trainer.contract.errors import ContractError

    host, recorded = request.place.host, None
    with suppress(ContractError):  # a damaged record; the run directory has its own
        recorded = options.runs().manifest(request.tag)
    return Landings(lambda: connect_host(host, accept_new=options.accept_new), recorded)


def _tell(notice: "Notice") -> None:
    say(notice.text)


def _outcome_exit(ended: "Ended") -> int:
    return int(ExitCode.OK if ended.state in ("finished", "stopped") else ExitCode.FAILED)


def _left_alone(tag: str) -> int:
    """Say that only the view ended."""
    sys.stderr.write(
        f"the run {tag} goes on without this view\n"
        f"  look again: dflashctl watch {tag}\n  stop it:    dflashctl stop {tag}\n"
    )
    return int(ExitCode.INTERRUPTED)


def _failure_exit(failures: "Sequence[PlaceFailure]", num_places: int, *, quiet: bool) -> int:
    """Report the places that gave no answer; exit 6, or their own status when all failed alike."""
    from dflashctl.render.runs import failure_lines

    if not failures:
        return int(ExitCode.OK)
    if not quiet:
        warn_text(failure_lines(failures))
    codes = {failure.exit_code for failure in failures}
    alike = len(failures) == num_places and len(codes) == 1
    return codes.pop() if alike else int(ExitCode.PARTIAL)
