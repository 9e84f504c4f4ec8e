"""The command line: ``dflashctl VERB ...``. Each verb parses, calls one operation and renders.

Nothing heavy is imported at the start: a verb imports its operation when it is called.
"""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from dflashctl import __version__
from dflashctl.cli.verb import Verbs
from dflashctl.errors import DflashctlError, ExitCode, UsageError
from dflashctl.render.failure import save_trace, show_failure
from trainer.contract.errors import ContractError

# Failures of the surroundings that name no file: those of the streams and the working directory.
_SURROUNDINGS = {
    errno.ENOSPC: "no space left where the output goes",
    errno.EIO: "the output cannot be written",
    errno.ENOENT: "the working directory is gone; cd to one that exists",
}
_CLICK_ERROR = typer.BadParameter.__mro__[2]  # click's own ClickException, vendored or not

# The modules of this package, in the order of --help, with the verbs that each registers.
MODULES = {
    "act": "init deploy push gpus launch stop evaluate export attach",
    "rehearse": "check warmup data",
    "doctor": "doctor",
    "observe": "watch logs status pull runs",
    "execute": "exec",
    "locks": "locks",
    "site": "lab demo",
}
_MODULE_OF = {verb: module for module, verbs in MODULES.items() for verb in verbs.split()}


class _Root(Verbs):
    """All verbs; a module of them is imported when one of its verbs is asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb; the error for an unknown one suggests among all."""
        self._load([_MODULE_OF[cmd_name]] if cmd_name in _MODULE_OF else MODULES)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        del ctx
        self._load(MODULES)
        return list(_MODULE_OF)

    def _load(self, modules: Iterable[str]) -> None:
        for module in modules:
            if MODULES[module].split()[0] not in self.commands:
                part = typer.Typer(cls=Verbs, rich_markup_mode=None)
                importlib.import_module(f"dflashctl.cli.{module}").register(part)
                self.commands.update(typer.main.get_group(part).commands)


app = typer.Typer(
    cls=_Root,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train DFlash drafters in Proxmox LXC containers, from the laptop.",
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - the signature that typer calls
    if value:
        typer.echo(f"dflashctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="print the version"),
    ] = False,
) -> None:
    """Train DFlash drafters in Proxmox LXC containers, from the laptop."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; nothing but --debug shows a traceback."""
    _open_closed_streams()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(argv)
    except BrokenPipeError:
        return _reader_left()


def _run(argv: list[str]) -> int:
    """Run the verb and show its error; raises BrokenPipeError when nobody reads stdout."""
    try:
        result = app(args=argv, prog_name="dflashctl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        return int(ExitCode.INTERRUPTED)
    except SystemExit as ending:
        # Completion ends so; and typer itself, with 1, when `| head` has closed the pipe.
        if isinstance(ending.__context__, BrokenPipeError):
            raise ending.__context__ from None
        return ending.code if isinstance(ending.code, int) else 1
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - a user sees one line, whatever it is
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n")
            return int(ExitCode.USAGE)
        shown = _as_dflashctl_error(error)
        ours = argv[: argv.index("--")] if "--" in argv else argv  # not those of `exec -- CMD`
        if "--debug" in ours and not isinstance(error, _CLICK_ERROR):
            sys.excepthook(*sys.exc_info())
        _show(shown, as_json="--json" in ours)
        return int(shown.exit_code)


def _show(error: DflashctlError, *, as_json: bool) -> None:
    """Show the error; where stdout takes nothing more, its text goes to stderr alone."""
    try:
        show_failure(error, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:  # a full disk behind `> file`
        _drop_stdout()
        with contextlib.suppress(OSError):
            show_failure(error, as_json=False)


def _open_closed_streams() -> None:
    """Give a stream that the caller closed (``>&-``) the null device, under its own number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _drop_stdout() -> None:
    """Let go of a stdout that takes nothing; Python would complain when it flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_left() -> int:
    """End quietly after ``| head``."""
    _drop_stdout()
    return int(ExitCode.OK)


def _as_dflashctl_error(error: Exception) -> DflashctlError:
    """Return the error in the words that a user can act on."""
    if isinstance(error, DflashctlError):
        return error
    if isinstance(error, ContractError):
        return UsageError(str(error))
    if isinstance(error, _CLICK_ERROR):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "dflashctl"
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return UsageError(text, hint=f"{path} --help")
    if isinstance(error, OSError) and error.filename is not None:
        return DflashctlError(error.strerror or str(error), place=str(error.filename), code="file")
    if isinstance(error, OSError) and error.errno in _SURROUNDINGS:
        return DflashctlError(_SURROUNDINGS[error.errno], code="file")
    try:
        where = f"the traceback is in {save_trace(error)}; --debug shows it"
    except OSError:  # no home, or a full or read-only one
        where = "--debug shows the traceback"
    return DflashctlError(f"unexpected {type(error).__name__}: {error}", hint=where, code="bug")
