"""The verbs of the look-alike site: lab up, down, status, fault; and the demo."""

import typer


def register(app: typer.Typer) -> None:
    """Add ``lab`` and ``demo`` to ``app``."""
