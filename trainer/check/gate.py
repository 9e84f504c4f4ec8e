"""The gate: all checks of a run in their order, as ``python -m trainer check --run-dir DIR``.

A check that needs another one which failed is skipped and says so. A check that breaks has failed:
what it ran is what the run would have run.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.check import artifact, features, isolation, objective, parity, tokens
from trainer.check.findings import SKIPPED, FaultFoundError, Finding, NotApplicableError, Report
from trainer.check.subject import Subject
from trainer.export.findings import FAIL, OK

_FAST_THREADS = 4
_RELEASE = "this release of the trainer computes it wrongly: do not train with it, mend that module"


@dataclass(frozen=True)
class Check:
    """One named check: its function tells what it saw, or raises what it found.

    needs: names of checks without which it means nothing. where and fix: told when it fails and
    knows nothing nearer. faults: numbers of docs/faults.md.
    """

    name: str
    look: Callable[[Subject], str]
    needs: tuple[str, ...]
    where: str
    faults: tuple[int, ...]
    fix: str = _RELEASE


CHECKS = (
    Check(
        "draft-shape",
        tokens.draft_shape,
        (),
        "train.yaml: draft",
        (38, 42),
        "change that setting in train.yaml",
    ),
    Check("mask-token", tokens.mask_token, (), "train.yaml: draft.mask_token_id", (34, 38)),
    Check("answers", tokens.answers, (), "data.path", (35, 36)),
    Check(
        "target-files",
        features.weights_on_disk,
        (),
        "target.path",
        (1, 15),
        "copy the model again, whole",
    ),
    Check(
        "target",
        features.target_loads,
        ("draft-shape",),
        "train.yaml: target, run.device",
        (15, 39),
        "mend what it says: the run would load the target in the same way",
    ),
    *(
        Check(name, look, ("target",), f"trainer/{where}", faults)
        for name, look, where, faults in (
            ("layer-offset", features.layer_offset, "model/target.py", (5, 22, 41, 42)),
            ("batch-isolation", features.batch_isolation, "workers/target.py", (9, 25)),
            ("serve-features", features.serve_features, "model/target.py", (4, 25)),
            ("head-identity", features.head_identity, "model/target.py", (1, 44)),
            ("tap-count", features.tap_count, "model/draft.py", (42,)),
            ("rope", parity.rope, "model/draft_config.py", (25,)),
            ("positions", parity.positions, "data/packing.py", (4, 20)),
            ("anchors", objective.anchors, "data/anchors.py", (6, 21)),
            ("slots", objective.slots, "loss.py", (1, 8, 24, 46)),
            ("weights", objective.weights, "loss.py", (6, 20, 36)),
            ("loss", objective.loss_value, "loss.py", (1, 8, 23)),
            ("hits", objective.counted_hits, "model/variants", (4, 5)),
            ("strict-context", isolation.strict_context, "model/masks.py", (4, 5)),
            ("documents", isolation.document_isolation, "model/masks.py", (20,)),
            ("blocks", isolation.block_isolation, "model/masks.py", (2,)),
            ("padding", isolation.padded_blocks, "model/masks.py", (33,)),
            ("causal", isolation.causal_flag, "model/masks.py", (3, 43)),
            ("window", isolation.window_edge, "model/masks.py", (43,)),
            ("mask-table", isolation.mask_table, "model/masks.py", (2, 3, 4, 20, 43)),
            ("backends", isolation.backends_agree, "model/attention.py", (17, 18)),
            ("forward-equals-decode", parity.forward_equals_decode, "model/draft.py", (4, 25, 43)),
            ("dtypes", artifact.dtypes, "optim.py", (45, 47)),
            ("export", artifact.export_round_trip, "export", (16, 42, 46)),
            ("resume-guard", artifact.resume_guard, "assembly.py", (34,)),
        )
    ),
)


def examine(run_dir: Path, *, fast: bool) -> Report:
    """Make every check of a run and report what was found.

    fast: a miniature of the target and the first chats, in seconds on one core. Progress goes to
    stderr in the full check. Raises: ContractError, DataError or TargetError when there is nothing
    to check: no manifest, no data, no target.
    """
    began = time.monotonic()
    if fast:  # many threads only wait for each other over small tensors
        torch.set_num_threads(min(torch.get_num_threads(), _FAST_THREADS))
    subject = Subject(run_dir, fast=fast)
    # Without these there is nothing to check, and the trainer's own words are the best.
    _ = subject.known, subject.tokenizer, subject.data.samples
    findings: dict[str, Finding] = {}
    for check in CHECKS:
        if not fast:
            sys.stderr.write(f"checking {check.name}\n")
        findings[check.name] = _look(check, subject, findings)
    return Report(
        tuple(findings.values()), fast, subject.config.target.path, time.monotonic() - began
    )


def _look(check: Check, subject: Subject, before: dict[str, Finding]) -> Finding:
    unmet = [name for name in check.needs if before[name].status != OK]
    if unmet:
        status = before[unmet[0]].status
        why = "failed" if status == FAIL else "was skipped"
        return Finding(check.name, SKIPPED, f"{unmet[0]} {why}", faults=check.faults)
    began = time.monotonic()
    try:
        told = check.look(subject)
    except NotApplicableError as reason:
        return Finding(check.name, SKIPPED, str(reason), faults=check.faults)
    except FaultFoundError as fault:
        return _failed(check, fault, began)
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break the run
        return _failed(check, _broken(error), began)
    return Finding(
        check.name, OK, told, faults=check.faults, seconds=round(time.monotonic() - began, 3)
    )


def _failed(check: Check, fault: FaultFoundError, began: float) -> Finding:
    return Finding(
        check.name,
        FAIL,
        fault.what,
        fault.where or check.where,
        fault.fix or check.fix,
        check.faults,
        round(time.monotonic() - began, 3),
    )


def _broken(error: Exception) -> FaultFoundError:
    """Return what broke and the innermost line of the trainer that it broke in."""
    root = Path(__file__).resolve().parents[2]
    frames = [
        f"{Path(frame.filename).relative_to(root)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root / "trainer")
    ]
    frames = [name for name in frames if not name.startswith("trainer/check/")] or frames
    text = " ".join(str(error).split()) or type(error).__name__
    known = type(error).__module__.startswith("trainer.")
    return FaultFoundError(
        text if known else f"{type(error).__name__}: {text}",
        where="" if known else (frames[-1] if frames else ""),
    )
