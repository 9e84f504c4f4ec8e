"""The verbs that look: watch, logs, status, runs, pull."""

import typer


def register(app: typer.Typer) -> None:
    """Add the observing verbs to ``app``."""
