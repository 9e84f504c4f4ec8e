"""``python -m trainer check --run-dir DIR [--fast] [--reuse] [--json]``: the report and its status.

Standard library until a check is really made: a check that is remembered costs no import of torch.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.check import record
from trainer.check.findings import Report
from trainer.contract.errors import ManifestError
from trainer.contract.exit_record import TrainerExit
from trainer.contract.manifest import Manifest


@dataclass(frozen=True)
class CheckOptions:
    """fast: no weights of the target. reuse: a fast check that passed is not made again."""

    fast: bool = False
    reuse: bool = False
    as_json: bool = False


def check_run(run_dir: Path, options: CheckOptions) -> TrainerExit:
    """Check a run, print the report and keep a fast one beside the manifest.

    Raises: ContractError, DataError or TargetError when there is nothing to check.
    """
    key = record.key_of(_manifest(run_dir))
    report = record.recall(run_dir, key) if options.fast and options.reuse else None
    if report is None:
        report = _examined(run_dir, fast=options.fast)
        if options.fast:
            record.remember(run_dir, key, report)
    text = json.dumps(report.to_dict()) + "\n" if options.as_json else report.table()
    sys.stdout.write(text)
    return TrainerExit.FINISHED if report.ok else TrainerExit.FAULTS


def _examined(run_dir: Path, *, fast: bool) -> Report:
    from trainer.check.gate import examine  # noqa: PLC0415 - torch takes seconds to import

    return examine(run_dir, fast=fast)


def _manifest(run_dir: Path) -> Manifest:
    path = run_dir / "manifest.json"
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; is this a run directory?") from error
