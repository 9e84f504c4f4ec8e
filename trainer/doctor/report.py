"""``python -m trainer doctor --run-dir DIR``: everything that is known before a launch, and judged.

The target is loaded for two of the figures, the on-policy score and the seconds of a step; with
``--samples 0`` it is not, and no GPU is needed.
"""

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trainer import assembly
from trainer.contract.config import TrainConfig
from trainer.contract.errors import ConfigError
from trainer.contract.exit_record import TrainerExit
from trainer.contract.manifest import Manifest
from trainer.data.dataset import Dataset, load_tokenizer
from trainer.data.packing import BatchMaker, BatchPlan
from trainer.data.shards import open_dataset
from trainer.device import current_device
from trainer.doctor import policy, room, samples, schedule
from trainer.doctor.findings import PROBLEM, Finding, problem
from trainer.doctor.text import report_text
from trainer.errors import DataError, TargetError
from trainer.model.draft_config import DraftConfig
from trainer.model.target import Target

VERSION = 1


@dataclass
class Report:
    """What was found out; a part that could not be is None."""

    findings: list[Finding] = field(default_factory=list)
    data: samples.DataFacts | None = None
    plan: schedule.PlanFacts | None = None
    on_policy: policy.PolicyFacts | None = None
    hours: schedule.HoursFacts | None = None
    disk: room.DiskFacts | None = None
    host: room.HostFacts | None = None
    devices: dict[str, room.DeviceFacts] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing forbids a launch."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON document, with its text for people in ``text``."""
        parts = {
            "data": _plain(self.data, "supervised_frac"),
            "plan": _plain(self.plan),
            "on_policy": _plain(self.on_policy, "surprise"),
            "hours": _plain(self.hours),
            "disk": _plain(self.disk, "needed_bytes"),
            "host": _plain(self.host, "needed_bytes"),
            "devices": {name: _plain(d, "needed_bytes") for name, d in self.devices.items()},
        }
        findings = [asdict(finding) for finding in self.findings]
        head = {"kind": "doctor", "v": VERSION, "ok": self.ok, "findings": findings}
        return head | parts | {"text": report_text(self)}


def _plain(part: Any, *properties: str) -> dict[str, Any] | None:
    """Return a part's fields and the named properties; None for what could not be found out."""
    if part is None:
        return None
    return asdict(part) | {name: getattr(part, name) for name in properties}


def diagnose_run(run_dir: Path, num_samples: int, *, as_json: bool) -> TrainerExit:
    """Look at the run, print the report; FAULTS when something forbids a launch.

    num_samples: chats for the on-policy score. Raises: TargetError, DataError (no tokenizer),
    ContractError; what is wrong with the data itself is a finding.
    """
    if num_samples < 0:
        raise ConfigError(f"--samples {num_samples}: at least 0")
    manifest, config = assembly.read_manifest(run_dir)
    report = diagnose(manifest, config, run_dir, num_samples)
    document = report.to_dict()
    sys.stdout.write(json.dumps(document) + "\n" if as_json else str(document["text"]))
    sys.stdout.flush()
    return TrainerExit.FINISHED if report.ok else TrainerExit.FAULTS


def diagnose(manifest: Manifest, config: TrainConfig, run_dir: Path, num_samples: int) -> Report:
    """Find out everything and judge it; raises as ``diagnose_run``."""
    report = Report()
    tokenizer = load_tokenizer(config.target.path, config.target.revision)
    text_config = _text_config(config)
    draft = DraftConfig.from_target(text_config, config.draft, int(text_config.num_hidden_layers))
    try:
        dataset = open_dataset(config.data.path, tokenizer, config.data.max_length)
    except DataError as error:
        report.findings.append(_unusable(error, config))
        return report
    _say(f"looking at {len(dataset.samples)} samples")
    report.data = samples.look_at_data(dataset, tokenizer, config)
    report.findings += samples.data_findings(report.data, config)
    maker = _lay_out(report, dataset, manifest, config)
    report.host = room.host_facts(report.data, draft, config)
    if report.plan is not None:
        report.disk = room.disk_facts(run_dir, draft, config, report.plan.num_steps)
    target = _target(manifest, config) if num_samples else None
    if target is not None:
        _with_target(report, target, dataset, config, num_samples)
    if report.plan is not None and maker is not None:
        measured = schedule.earlier_step_s(manifest)
        if measured is None and target is not None:
            _say("timing a few steps")
            share = _uncached_share(report.host, report.plan)
            measured = schedule.timed_step_s(manifest, config, target, maker, share)
        report.hours = schedule.hours(report.plan.num_steps, measured)
    weight_bytes = _weight_bytes(config, target)
    report.devices = _devices(manifest, config, draft, (text_config, weight_bytes), target)
    report.findings += room.room_findings(report.disk, report.host, report.devices)
    report.findings.sort(key=lambda finding: finding.level != PROBLEM)
    return report


def _lay_out(
    report: Report, dataset: Dataset, manifest: Manifest, config: TrainConfig
) -> BatchMaker | None:
    """Plan the run; a mask token in the data is no bar, because the plan does not depend on it."""
    assert report.data is not None  # noqa: S101 - the caller has just looked
    absent = replace(config.draft, mask_token_id=report.data.largest_id + 1)
    plain = replace(config, draft=absent)
    try:
        plan = BatchPlan(dataset.lengths, config.data, config.seed)
        maker = BatchMaker(dataset, plan, plain)
        num_drafters = len(manifest.devices("drafter"))
        data = assembly.Data(dataset, plan, maker)
        report.plan = schedule.plan_facts(data, plain, num_drafters)
    except DataError as error:
        report.findings.append(schedule.no_plan(error))
        return None
    report.findings += schedule.plan_findings(report.plan, config)
    return maker


def _uncached_share(host: room.HostFacts, plan: schedule.PlanFacts) -> float:
    """Return the share of visits whose features are made and not found in the cache."""
    cached = min(1.0, host.cache_bytes / max(host.features_bytes, 1))
    epochs = max(plan.num_steps / plan.steps_in_epoch, 1.0)
    return 1 - cached * (1 - 1 / epochs)


def _with_target(
    report: Report, target: Target, dataset: Dataset, config: TrainConfig, num_samples: int
) -> None:
    chosen = policy.chosen_samples(len(dataset.samples), num_samples, config.seed)
    _say(f"asking the target about {len(chosen)} samples")
    with current_device(target.device):
        found = policy.on_policy(target, [dataset.samples[i] for i in chosen], config.seed)
    report.on_policy = found
    report.findings += policy.policy_findings(found, dataset.path)


def _target(manifest: Manifest, config: TrainConfig) -> Target:
    device = assembly.devices_of(manifest, config).targets[0]
    _say(f"loading {config.target.path}")
    return assembly.load_targets(config, [device])[str(device)]


def _text_config(config: TrainConfig) -> Any:
    """Return the target's text configuration without its weights. Raises: TargetError."""
    where = config.target.path
    try:
        known = AutoConfig.from_pretrained(where, revision=config.target.revision)
    except (OSError, ValueError) as error:
        raise TargetError(f"target.path {where}: no configuration: {error}") from error
    return known.get_text_config()


def _weight_bytes(config: TrainConfig, target: Target | None) -> int:
    """Return the bytes of the target's weights: of the loaded ones, else of its files."""
    if target is not None:
        return sum(p.numel() * p.element_size() for p in target.model.parameters())
    return sum(path.stat().st_size for path in Path(config.target.path).glob("*.safetensors"))


def _devices(
    manifest: Manifest,
    config: TrainConfig,
    draft: DraftConfig,
    weights: tuple[Any, int],
    target: Target | None,
) -> dict[str, room.DeviceFacts]:
    """Return the memory of one device of each role; all devices of a role hold the same."""
    cards = [room.Card("", "a device that was not asked", None)] * 2
    if target is not None:
        devices = assembly.devices_of(manifest, config)
        cards = [room.Card.of(d) for d in (devices.targets[0], devices.drafters[0])]
    text_config, weight_bytes = weights
    return {
        "target": room.target_facts(text_config, weight_bytes, draft, config, cards[0]),
        "drafter": room.drafter_facts(draft, config, cards[1]),
    }


def _unusable(error: DataError, config: TrainConfig) -> Finding:
    return problem("data", str(error), config.data.path, "mend the data, or name another data.path")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
