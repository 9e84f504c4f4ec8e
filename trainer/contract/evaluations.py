"""evaluations.json: every evaluation that a run made of itself, and which checkpoint was best.

One file, replaced by rename: after a kill an evaluation is in it, with the choice of the best that
follows from it, or it is not and is made again.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.contract.durable import write_by_rename
from trainer.contract.errors import EvaluationsError

VERSION = 1
FILE = "evaluations.json"
RAW, EMA = "raw", "ema"


@dataclass(frozen=True)
class Best:
    """The weights (raw or ema) of the checkpoint that measured best."""

    step: int
    weights: str
    acceptance_length: float


@dataclass
class Evaluations:
    """Evaluations by step. An entry maps ``raw``, and ``ema`` where there is an average, to what
    was measured, and says in ``saved`` whether there is a checkpoint of that step.
    """

    entries: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path) -> "Evaluations":
        """Read the file of a run; empty when there is none.

        Raises: EvaluationsError naming the file when it is damaged or newer.
        """
        path = run_dir / FILE
        try:
            raw = json.loads(path.read_bytes())
            version = int(raw["v"])
            entries = {int(entry["step"]): dict(entry) for entry in raw["evaluations"]}
            made = cls(entries)
            made.best()  # reads every figure that will be needed
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationsError(f"{path} is not readable ({error}); move it away") from error
        if version > VERSION:
            raise EvaluationsError(f"{path} has version {version}, this reader knows {VERSION}")
        return made

    def best(self) -> Best | None:
        """Return the best of the saved ones by overall acceptance length, the earlier of equals."""
        found = [
            Best(step, weights, float(entry[weights]["acceptance_length"]))
            for step, entry in sorted(self.entries.items())
            for weights in (RAW, EMA)
            if weights in entry and entry["saved"]
        ]
        return max(found, key=lambda one: one.acceptance_length, default=None)

    def forget_after(self, step: int) -> None:
        """Drop what later steps measured: a run that goes on from ``step`` measures them again."""
        self.entries = {at: entry for at, entry in self.entries.items() if at <= step}

    def write(self, run_dir: Path) -> None:
        """Replace the file of a run. Raises: OSError."""
        best = self.best()
        document = {
            "v": VERSION,
            "best": None if best is None else vars(best),
            "evaluations": [entry for _, entry in sorted(self.entries.items())],
        }
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        write_by_rename(run_dir / FILE, text.encode())
