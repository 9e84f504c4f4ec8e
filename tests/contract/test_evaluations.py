"""evaluations.json, and the settings of evaluation, average and export that go with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.config import TrainConfig
from trainer.contract.errors import ConfigError, EvaluationsError
from trainer.contract.evaluations import Best, Evaluations

NEEDED: dict[str, Any] = {
    "target": {"path": "/models/t"},
    "data": {"path": "/data/c.jsonl"},
    "draft": {"mask_token_id": 16},
}
PROMPTS = {"every_steps": 100, "prompts": "/data/heldout.jsonl"}


def _entry(step: int, raw: float, ema: float | None = None, *, saved: bool = True) -> Any:
    entry: dict[str, Any] = {"step": step, "saved": saved, "raw": {"acceptance_length": raw}}
    return entry if ema is None else entry | {"ema": {"acceptance_length": ema}}


def test_best_is_the_longest_of_raw_and_average_and_the_earlier_of_equals() -> None:
    made = Evaluations({20: _entry(20, 1.5, 2.5), 10: _entry(10, 2.5, 1.0), 30: _entry(30, 2.0)})
    assert made.best() == Best(10, "raw", 2.5)
    assert Evaluations({5: _entry(5, 1.5, 1.75)}).best() == Best(5, "ema", 1.75)


def test_evaluation_without_a_checkpoint_is_never_the_best() -> None:
    made = Evaluations({10: _entry(10, 1.5), 20: _entry(20, 3.0, saved=False)})
    assert made.best() == Best(10, "raw", 1.5)
    assert Evaluations({20: _entry(20, 3.0, saved=False)}).best() is None


def test_written_evaluations_are_read_back_and_name_the_best(tmp_path: Path) -> None:
    made = Evaluations({20: _entry(20, 1.5), 10: _entry(10, 2.0)})
    made.write(tmp_path)
    assert Evaluations.read(tmp_path) == made
    document = json.loads((tmp_path / "evaluations.json").read_text())
    assert document["best"] == {"step": 10, "weights": "raw", "acceptance_length": 2.0}
    assert [entry["step"] for entry in document["evaluations"]] == [10, 20]


def test_what_later_steps_measured_is_forgotten() -> None:
    made = Evaluations({10: _entry(10, 2.0), 20: _entry(20, 3.0)})
    made.forget_after(10)
    assert made.best() == Best(10, "raw", 2.0)
    made.forget_after(0)
    assert made.best() is None


def test_run_without_the_file_has_no_evaluations(tmp_path: Path) -> None:
    assert Evaluations.read(tmp_path) == Evaluations({})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not readable"),
        ('{"v": 1, "evaluations": [{"step": 1, "saved": true, "raw": {}}]}', "not readable"),
        ('{"v": 2, "evaluations": []}', "version 2, this reader knows 1"),
    ],
)
def test_damaged_or_newer_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "evaluations.json").write_text(text)
    with pytest.raises(EvaluationsError, match=rf"evaluations\.json .*{told}"):
        Evaluations.read(tmp_path)


def test_one_path_of_prompts_is_named_after_its_file() -> None:
    config = TrainConfig.from_dict(NEEDED | {"evaluation": PROMPTS})
    assert config.evaluation.prompts == {"heldout": "/data/heldout.jsonl"}
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_prompts_by_name_are_data_sets() -> None:
    files = {"gsm8k": "/data/a.jsonl", "mt-bench": "/data/b.jsonl"}
    config = TrainConfig.from_dict(NEEDED | {"evaluation": {"every_steps": 5, "prompts": files}})
    assert config.evaluation.prompts == files
    assert TrainConfig.from_dict(NEEDED | {"evaluation": {"prompts": ""}}).evaluation.prompts == {}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"evaluation": {"prompts": 3}}, "evaluation.prompts: expected a path, or paths by name"),
        ({"evaluation": {"prompts": {"a": 3}}}, "evaluation.prompts.a: expected a path, got 3"),
        ({"evaluation": {"prompts": {"a": ""}}}, "evaluation.prompts.a: expected a path, got ''"),
        ({"evaluation": {"every_steps": 5}}, "evaluation.prompts: expected JSONL files of"),
        ({"evaluation": PROMPTS | {"every_steps": 0}}, "evaluation.every_steps: expected at"),
        ({"evaluation": PROMPTS | {"num_prompts": 0}}, "evaluation.num_prompts: expected at"),
        ({"evaluation": PROMPTS | {"max_new_tokens": 1}}, "evaluation.max_new_tokens: expected at"),
        ({"optim": {"ema_decay": 1.0}}, "optim.ema_decay: expected above 0, below 1, got 1.0"),
        ({"run": {"export_weights": "first"}}, "run.export_weights: expected one of raw, ema"),
        ({"run": {"export_weights": "ema"}}, "run.export_weights: ema needs optim.ema_decay"),
        ({"run": {"export_weights": "best"}}, "run.export_weights: best needs evaluation.every"),
    ],
)
def test_setting_that_does_not_fit_is_named(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as info:
        TrainConfig.from_dict(NEEDED | sections)
    assert str(info.value).startswith(told)
