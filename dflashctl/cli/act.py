"""The verbs that act: init, deploy, push, gpus, warmup, launch, stop, evaluate, export, attach."""

import typer


def register(app: typer.Typer) -> None:
    """Add the acting verbs to ``app``."""
