"""The model card says what the run's records say, and of every other fact that it is absent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.export.conftest import SHAPE
from trainer.__main__ import main
from trainer.contract.events import encode
from trainer.contract.exit_record import ExitRecord
from trainer.export.card import Training, describe, refresh
from trainer.export.validate import validate
from trainer.model.draft import DraftConfig

MakeRun = Callable[..., Path]

MEASURED: dict[str, Any] = {
    "draft": "step_00000008",
    "acceptance_length": 2.3456,
    "acceptance_length_interval": [2.1, 2.6],
    "by_position": [0.71, 0.4, 0.24],
    "lossless": True,
    "num_equal": 20,
    "num_prompts": 20,
    "prompts_sha256": "ab" * 32,
    "max_new_tokens": 64,
    "target_dtype": "float32",
    "speed_up": 1.25,
}


def write_events(run_dir: Path, *events: tuple[float, str, dict[str, Any]]) -> None:
    """Write metrics.jsonl: seconds, kind and facts of each event."""
    lines = [
        encode({"v": 1, "seq": i, "t_unix_s": at, "run_id": "r", "kind": kind} | facts)
        for i, (at, kind, facts) in enumerate(events)
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines))


def two_starts(run_dir: Path) -> None:
    """A run that was killed after 1,800 s, and went on for 5,400 s an hour later."""
    step = {"num_steps": 8, "epoch": 0, "tokens_total": 1000, "anchors_total": 300}
    write_events(
        run_dir,
        (1000.0, "phase", {"phase": "data"}),
        (1010.0, "phase", {"phase": "load", "samples": 24}),
        (2800.0, "step", step | {"step": 4}),
        (6400.0, "phase", {"phase": "data"}),
        (6500.0, "phase", {"phase": "load", "samples": 24}),
        (11790.0, "step", step | {"step": 8, "epoch": 1, "tokens_total": 1234567}),
        (11800.0, "phase", {"phase": "export"}),
    )
    ended = ExitRecord("r", "killed", None, 9, 1.0, 2.0, 4, None, oom_kill=False)
    (run_dir / "exit_1.json").write_text(ended.to_json())


def draft() -> DraftConfig:
    return DraftConfig(**SHAPE)


def row(card: str, name: str) -> str:
    """Return the value of a row of the card's tables."""
    found = [line.split(" | ")[1] for line in card.splitlines() if line.startswith(f"| {name} | ")]
    assert len(found) == 1, (name, found)
    return found[0].removesuffix(" |")


def test_hours_are_those_of_every_start_together(make_run: MakeRun):
    run_dir = make_run()
    two_starts(run_dir)
    training = Training.read(run_dir)
    assert (training.num_starts, training.seconds) == (2, 1800.0 + 5400.0)
    assert (training.num_samples, training.ends) == (24, ("killed",))
    assert training.last["step"] == 8


def test_card_holds_recipe_hours_and_how_to_serve(make_run: MakeRun):
    run_dir = make_run(target={"path": "org/big-model", "dtype": "float32"})
    two_starts(run_dir)
    card = describe(run_dir, draft(), "step_00000008")
    assert row(card, "weights") == "step_00000008"
    assert row(card, "target") == "org/big-model"
    assert row(card, "target revision") == "r1"
    assert row(card, "samples") == "24"
    assert row(card, "tokens trained on") == "1,234,567"
    assert row(card, "blocks trained on") == "300"
    assert row(card, "steps") == "8 of 8"
    assert row(card, "epochs") == "50 planned, the last step was in epoch 2"
    assert row(card, "optimiser") == "adamw, lr 0.003, cosine after 0.04 of the steps"
    assert row(card, "loss") == "cross-entropy, position decay gamma 3"
    assert row(card, "hours") == "2 of wall clock in 2 starts (ended: killed)"
    assert row(card, "hardware") == "target: 1 x CPU, drafter: 1 x CPU"
    assert row(card, "taps") == "outputs of layers [1, 3] of 6"
    assert "torch " in row(card, "versions")
    assert "base_model: org/big-model\n" in card
    assert '"num_speculative_tokens": 3}' in card  # the block of 4 less its anchor
    assert "--speculative-num-draft-tokens 4" in card
    assert "Nothing was measured yet" in card


def test_facts_without_a_record_are_said_to_be_absent(make_run: MakeRun):
    card = describe(make_run(), draft(), "step_00000008")
    for name in ("samples", "tokens trained on", "blocks trained on", "hours"):
        assert row(card, name) == "not recorded"
    assert row(card, "steps") == "not recorded of not recorded"


def test_measured_figures_are_those_of_evaluation_json(make_run: MakeRun):
    run_dir = make_run()
    (run_dir / "evaluation.json").write_text(json.dumps(MEASURED))
    card = describe(run_dir, draft(), "step_00000008")
    assert row(card, "acceptance length") == "2.35 (95 %: 2.10 to 2.60)"
    assert row(card, "accepted, by position") == "0.71 0.40 0.24"
    assert row(card, "lossless") == "yes"
    assert row(card, "equal to plain greedy decoding") == "20 of 20"
    assert row(card, "prompts") == f"20, sha256 {'ab' * 32}"
    assert row(card, "speed-up, on the machine that measured") == "1.25"
    (run_dir / "evaluation.json").write_text(json.dumps(MEASURED | {"speed_up": None}))
    card = describe(run_dir, draft(), "step_00000008")
    assert row(card, "speed-up, on the machine that measured") == "none claimed: outputs differ"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"draft": "step_00000004"}, "measured step_00000004, not these weights"),
        ({"draft": "export"}, "measured an earlier export, not these weights"),
        ({"acceptance_length": None}, "evaluation.json cannot be read"),
    ],
)
def test_figures_of_other_weights_are_left_out(
    change: dict[str, Any], told: str, make_run: MakeRun
):
    run_dir = make_run()
    (run_dir / "evaluation.json").write_text(json.dumps(MEASURED | change))
    card = describe(run_dir, draft(), "step_00000008")
    assert told in card
    assert "2.35" not in card


def test_run_without_an_export_has_no_card_to_refresh(make_run: MakeRun):
    assert not refresh(make_run())


def test_trained_run_is_exported_with_a_card_that_evaluation_completes(
    make_run: MakeRun, tiny_chats: Path, tiny_target: Path
):
    run_dir = make_run(optim={"max_steps": 3})
    where = ["--run-dir", str(run_dir)]
    assert main(["train", *where]) == 0
    path = run_dir / "export" / "README.md"
    card = path.read_text()
    assert "license: set-a-license\n" in card
    assert row(card, "weights") == "step_00000003"
    assert row(card, "samples") == "24"
    assert "Nothing was measured yet" in card
    report = validate(run_dir / "export", ["all"], tiny_target)
    assert report.ok
    assert [f.where for f in report.findings if f.rule == "card"] == ["README.md: license"]
    path.write_text(card.replace("set-a-license", "apache-2.0"))
    measure = ["evaluate", *where, "--prompts", str(tiny_chats), "--num-prompts", "2"]
    assert main([*measure, "--max-new-tokens", "4"]) == 0
    card = path.read_text()
    assert "license: apache-2.0\n" in card
    measured = json.loads((run_dir / "evaluation.json").read_text())
    assert row(card, "acceptance length").startswith(f"{measured['acceptance_length']:.2f} (95 %")
    assert main(["export", *where, "--max-shard-bytes", "9000"]) == 0
    card = path.read_text()
    assert "license: apache-2.0\n" in card
    assert "measured an earlier export, not these weights" in card
    assert len(list((run_dir / "export").glob("model-*.safetensors"))) > 1
    assert validate(run_dir / "export", ["all"], tiny_target).ok
