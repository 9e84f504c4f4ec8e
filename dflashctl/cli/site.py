"""The verbs of the look-alike site (lab up, down, status, hosts, fault, run) and the demo."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflashctl.cli.verb import Verb, Verbs, current

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="the lab's files")]
DEFAULT_STATE = Path(".lab")


def register(app: typer.Typer) -> None:
    """Add ``lab`` and ``demo`` to ``app``."""
    lab = typer.Typer(
        cls=Verbs,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="A look-alike Proxmox site on this machine, to try and break.",
    )
    for verb in (up, down, status, hosts, fault):
        lab.command(verb.__name__, cls=Verb)(verb)
    lab.command("run", cls=Verb, context_settings={"ignore_unknown_options": True})(run)
    app.add_typer(lab, name="lab")
    app.command("demo", cls=Verb)(demo)


def up(
    state: State = DEFAULT_STATE,
    *,
    site: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: other hosts than kpro6 and kpro7")
    ] = None,
    workspace: Annotated[str, typer.Option(metavar="SIZE", help="of kpro6/200")] = "2g",
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="interpreter to show in the containers")
    ] = None,
    expose: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="to show read-only; repeatable")
    ] = None,
) -> None:
    """Start the site: real sshd and LXC, stand-in pct and nvidia-smi."""
    from dataclasses import replace

    from dflashctl.lab.interpreter import python_paths
    from dflashctl.lab.site import Lab
    from dflashctl.lab.spec import default_site, load_site

    spec = load_site(site) if site else default_site(workspace)
    paths = [str(path.absolute()) for path in expose or []]
    shown = python_paths(str(python or sys.executable))
    lab = Lab(state)
    lab.up(replace(spec, expose=(*spec.expose, *paths, *shown)))
    first = next(iter(spec.hosts))
    typer.echo(f"up: {', '.join(spec.hosts)}")
    typer.echo("next:")
    typer.echo(f"  dflashctl lab hosts --state {state} > hosts.yaml")
    typer.echo(f"  dflashctl gpus --limit {first}")
    typer.echo(f"  ssh -F {lab.ssh_config} {first} pct list")


def down(state: State = DEFAULT_STATE) -> None:
    """End the site and remove its files; fine when there is none."""
    from dflashctl.lab.site import Lab

    Lab(state).down()
    typer.echo("down")


def status(ctx: typer.Context, state: State = DEFAULT_STATE) -> None:
    """Show hosts, ports, containers and faults."""
    from dflashctl.lab.site import Lab
    from dflashctl.render.document import print_document

    found = Lab(state).status()
    if current(ctx).json:
        print_document(found)
        return
    typer.echo("up" if found.up else "down")
    for host in found.hosts:
        containers = ", ".join(f"{vmid} {what}" for vmid, what in host.containers.items())
        faults = ", ".join(f"{name} {value}" for name, value in host.faults.items())
        typer.echo(
            f"  {host.name}  127.0.0.1:{host.port} or {host.ip}:22"
            f"  containers: {containers or 'none'}  faults: {faults or 'none'}"
        )


def hosts(
    state: State = DEFAULT_STATE,
    *,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="interpreter in the containers")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="roles are threads on the CPU")] = False,
) -> None:
    """Print a hosts.yaml that points at this lab."""
    from dflashctl.lab.site import Lab

    typer.echo(Lab(state).hosts_yaml(python=str(python or sys.executable), cpu=cpu), nl=False)


def fault(
    host: Annotated[str, typer.Argument(metavar="HOST")] = "",
    name: Annotated[str, typer.Argument(metavar="FAULT")] = "",
    value: Annotated[str, typer.Argument(metavar="[VALUE]")] = "",
    state: State = DEFAULT_STATE,
) -> None:
    """Break something; without arguments, list the faults.

    The fault "none" mends all of a host.
    """
    from dflashctl.errors import UsageError
    from dflashctl.lab.faults import describe_faults
    from dflashctl.lab.site import Lab

    if not host:
        typer.echo(describe_faults().rstrip("\n"))
        return
    if not name:
        raise UsageError("which fault?", hint="dflashctl lab fault   (lists them)")
    Lab(state).fault(host, name, value)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...")],
    state: State = DEFAULT_STATE,
) -> None:
    """Run a command on the lab's network, with its real addresses."""
    from dflashctl.lab.site import Lab

    argv = Lab(state).lan_command(command)
    os.execvp(argv[0], argv)  # noqa: S606 - the terminal and the exit status are the command's


def demo(
    ctx: typer.Context,
    *,
    state: Annotated[
        Path, typer.Option(metavar="DIR", help="the demo's site, model and workspace")
    ] = Path(".demo"),
    backend: Annotated[
        str, typer.Option(metavar="auto|lab|local", help="lab needs root and LXC")
    ] = "auto",
    num_prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="held-out prompts to decode")
    ] = 20,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="training settings")
    ] = None,
) -> None:
    """Walk the whole road on this machine: train, resume, measure."""
    from dflashctl.demo.orchestrate import DemoOptions, run_demo
    from dflashctl.errors import UsageError

    if backend not in ("auto", "lab", "local"):
        raise UsageError(
            f"--backend {backend}: expected auto, lab or local",
            hint="dflashctl demo --backend local",
        )
    runs_dir = current(ctx).runs_dir or Path("runs")
    options = DemoOptions(
        state=state,
        runs_dir=runs_dir,
        backend=backend,
        num_prompts=num_prompts,
        overrides=tuple(sets or ()),
    )
    result = run_demo(options)
    typer.echo(f"demo ended in {result.elapsed_s:.0f} s")
