"""Say before a server is started which engines can load an export, and why one could not.

The rules of each engine are applied to the files; no engine and no GPU is needed or run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError, TrainerError
from trainer.export import rules, speculators, target_rules
from trainer.export.engines import ENGINES
from trainer.export.files import CONFIG, read_json
from trainer.export.findings import FAIL, Finding, Report
from trainer.export.rules import Rule, Subject
from trainer.export.target_files import TargetFiles
from trainer.export.zlab import check_kinds, draft_config
from trainer.model.draft import DraftConfig

ALL = "all"


def validate(directory: Path, engines: Sequence[str], target: Path | None = None) -> Report:
    """Apply the rules of ``engines`` ("all" stands for each) to an exported directory.

    Raises: TargetError when ``target`` is no model directory; CheckpointError when ``directory``
    does not exist. What is wrong with the export itself is a finding.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    unknown = sorted(set(engines) - ENGINES.keys() - {ALL})
    if unknown:
        raise CheckpointError(f"--engine {unknown[0]}: expected one of {', '.join(ENGINES)}, all")
    names = tuple(ENGINES) if ALL in engines else tuple(dict.fromkeys(engines))
    opened = None if target is None else TargetFiles.open(target)
    shown = None if target is None else str(target)
    try:
        subject = _open(directory, opened)
    except TrainerError as error:
        fix = "export the draft again; engines read these keys"
        found = Finding(FAIL, "config", str(error), CONFIG, fix, (30,))
        return Report(str(directory), "unreadable", names, (found,), shown)
    findings = _apply((*rules.RULES, *target_rules.RULES), subject)
    for name in names:
        findings += [replace(f, engine=name) for f in _apply((ENGINES[name],), subject)]
    return Report(str(directory), subject.layout, names, tuple(findings), shown)


def _apply(chosen: Iterable[Rule], subject: Subject) -> list[Finding]:
    """Apply rules; what one of them cannot read is a finding of that rule."""
    findings: list[Finding] = []
    for rule in chosen:
        name = rule.__name__.removesuffix("_rule").replace("_", " ")
        try:
            findings += list(rule(subject))
        except TrainerError as error:
            fix = "copy the model again, whole"
            findings.append(Finding(FAIL, name, str(error), "--target", fix))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            told, fix = f"a value is of another kind ({error!r})", "export the draft again"
            findings.append(Finding(FAIL, name, told, CONFIG, fix))
    return findings


def _open(directory: Path, target: TargetFiles | None) -> Subject:
    where = directory / CONFIG
    raw = read_json(where)
    if not speculators.is_speculators(raw):
        return Subject(directory, raw, "zlab", draft_config(raw, where), target)
    return Subject(directory, raw, "speculators", _speculators_draft(raw, where, target), target)


def _speculators_draft(raw: dict[str, Any], where: Path, target: TargetFiles | None) -> DraftConfig:
    """Return the draft of a speculators directory; its own ids bound the target's layers."""
    if raw["speculators_model_type"] != "dflash":
        raise CheckpointError(
            f"{where}: speculators_model_type {raw['speculators_model_type']!r} is no DFlash draft"
        )
    try:
        kept = raw.get(speculators.KEPT) or {}
        known = kept.get("num_target_layers") or max(raw["aux_hidden_state_layer_ids"]) + 1
        num_layers = int(known) if target is None else target.num_layers
        draft = speculators.draft_of(raw, num_layers)
        if not isinstance(raw["draft_vocab_size"], int):
            raise TypeError(f"draft_vocab_size {raw['draft_vocab_size']!r}")
    except KeyError as error:
        raise CheckpointError(f"{where}: no key {error}; is it a DFlash speculator?") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{where}: not a speculators configuration ({error})") from error
    check_kinds(draft, where)
    return draft
