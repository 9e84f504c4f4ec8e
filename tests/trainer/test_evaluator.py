"""Evaluation while a run trains: what it measures, what it keeps, and that it disturbs nothing."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import events_of
from trainer import assembly, checkpoint
from trainer.__main__ import main
from trainer.compile_gate import CompileGate, GateSettings
from trainer.contract.exit_record import TrainerExit
from trainer.data.dataset import load_tokenizer
from trainer.errors import CheckpointError, DataError
from trainer.evaluator import Evaluator
from trainer.held_out import HeldOut, draft_copy, load_prompt_sets
from trainer.learning_rate import Schedule
from trainer.metrics import Metrics
from trainer.model.attention import FlexAttention
from trainer.model.draft import DraftModel
from trainer.results import Choice, EvaluationOptions, evaluate_run, export_run
from trainer.run_state import RunState
from trainer.session import Session
from trainer.workers.drafter import StepRange
from trainer.workers.supervisor import Pulse, StopRequest

MakeRun = Callable[..., Path]
QUICK = {"every_steps": 4, "num_prompts": 3, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four chats that no run trains on: their questions have five words."""
    path = tmp_path_factory.mktemp("heldout") / "heldout.jsonl"
    lines = []
    for number in range(4):
        question = " ".join(f"w{number * 5 + i}" for i in range(5))
        turns = (("user", question), ("assistant", "w1 w2 w3"))
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _train(run_dir: Path, *, resume: bool = False) -> TrainerExit:
    return Session(run_dir, resume=resume).train()


def _evaluations(run_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run_dir / "evaluations.json").read_text())
    return document


def _state(run_dir: Path, step: int) -> checkpoint.CheckpointState:
    return checkpoint.load(run_dir / "checkpoints" / f"step_{step:08d}")


def test_run_tells_acceptance_overall_by_data_set_and_by_position(
    make_run: MakeRun, heldout: Path, tiny_chats: Path
) -> None:
    prompts = {"new": str(heldout), "old": str(tiny_chats)}
    run_dir = make_run(evaluation=QUICK | {"prompts": prompts, "every_steps": 5})
    assert _train(run_dir) is TrainerExit.FINISHED
    events = events_of(run_dir, "eval")
    assert [event["step"] for event in events] == [5, 10, 12]  # the last step as well
    for event in events:
        assert sorted(event["datasets"]) == ["new", "old"]
        assert (event["num_prompts"], event["datasets"]["new"]["num_prompts"]) == (6, 3)
        assert len(event["by_position"]) == len(event["datasets"]["old"]["by_position"]) == 3
        low, high = event["acceptance_length_interval"]
        assert 1.0 <= low <= event["acceptance_length"] <= high <= 4.0
        assert event["ema"] is None
    phases = [event["phase"] for event in events_of(run_dir, "phase")]
    assert phases[2:] == ["train", *["evaluate", "train"] * 3, "export"]


def test_prompts_that_are_trained_on_are_counted_in_a_warning(
    make_run: MakeRun, heldout: Path, tiny_chats: Path
) -> None:
    prompts = {"new": str(heldout), "old": str(tiny_chats)}
    run_dir = make_run(evaluation=QUICK | {"prompts": prompts, "every_steps": 100})
    _train(run_dir)
    (warning,) = events_of(run_dir, "warning")
    assert warning["text"] == (
        "evaluation.prompts.old: 3 of 3 prompts are in the training data;"
        " what they measure is not held out"
    )


def test_evaluation_and_average_change_no_bit_of_the_training(
    make_run: MakeRun, heldout: Path
) -> None:
    plain = make_run("plain")
    watched = make_run(
        "watched",
        evaluation=QUICK | {"prompts": str(heldout), "every_steps": 2},
        optim={"ema_decay": 0.9},
    )
    for run_dir in (plain, watched):
        torch.manual_seed(3)
        _train(run_dir)
    first, second = _state(plain, 12), _state(watched, 12)
    assert all(torch.equal(first.masters[n], second.masters[n]) for n in first.masters)
    assert all(torch.equal(first.optimizer[n], second.optimizer[n]) for n in first.optimizer)
    assert all(torch.equal(first.extras[n], second.extras[n]) for n in first.extras)
    assert first.trained == second.trained
    losses = [[event["loss"] for event in events_of(r, "step")] for r in (plain, watched)]
    assert losses[0] == losses[1]


def test_evaluation_in_training_measures_what_the_command_measures(
    make_run: MakeRun, heldout: Path
) -> None:
    run_dir = make_run(
        evaluation=QUICK | {"prompts": str(heldout), "every_steps": 40},
        optim={"max_steps": 40, "lr": 0.01},
        run={"checkpoint_every_steps": 40, "export_at_end": False},
    )
    _train(run_dir)
    event = events_of(run_dir, "eval")[-1]
    options = EvaluationOptions(heldout, num_prompts=3, max_new_tokens=8)
    result = evaluate_run(run_dir, options)
    for key in ("acceptance_length", "acceptance_length_interval", "by_position"):
        assert event[key] == result[key]


def test_best_checkpoint_is_kept_beside_the_newest_and_exported(
    make_run: MakeRun, heldout: Path
) -> None:
    # A rate that ruins the draft again: the best is not the last.
    run_dir = make_run(
        evaluation=QUICK | {"prompts": str(heldout)},
        optim={"max_steps": 24, "lr": 0.02, "ema_decay": 0.5},
        run={"checkpoint_every_steps": 4, "keep_checkpoints": 1, "export_weights": "best"},
    )
    _train(run_dir)
    document = _evaluations(run_dir)
    lengths = {
        (entry["step"], kind): entry[kind]["acceptance_length"]
        for entry in document["evaluations"]
        for kind in ("raw", "ema")
    }
    assert len(lengths) == 12
    best = document["best"]
    step, weights = best["step"], best["weights"]
    assert lengths[step, weights] == best["acceptance_length"] == max(lengths.values())
    kept = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert {f"step_{step:08d}", "step_00000024"} <= kept
    state = _state(run_dir, step)
    exported = load_file(run_dir / "export" / "model.safetensors")
    wanted = state.average if weights == "ema" else state.masters
    assert torch.equal(exported["norm.weight"], wanted["norm.weight"])


def test_weights_to_export_and_evaluate_can_be_chosen(
    make_run: MakeRun, heldout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(
        evaluation=QUICK | {"prompts": str(heldout)},
        optim={"ema_decay": 0.99},
        run={"export_weights": "ema"},
    )
    _train(run_dir)
    best = _evaluations(run_dir)["best"]
    last, chosen = _state(run_dir, 12), _state(run_dir, best["step"])

    def exported() -> torch.Tensor:
        return load_file(run_dir / "export" / "model.safetensors")["norm.weight"].clone()

    assert not torch.equal(last.average["norm.weight"], last.masters["norm.weight"])
    assert torch.equal(exported(), last.average["norm.weight"])
    assert main(["export", "--run-dir", str(run_dir)]) == 0
    assert torch.equal(exported(), last.masters["norm.weight"])
    assert main(["export", "--run-dir", str(run_dir), "--ema"]) == 0
    assert torch.equal(exported(), last.average["norm.weight"])
    assert main(["export", "--run-dir", str(run_dir), "--best"]) == 0
    assert torch.equal(exported(), chosen.weights(best["weights"])["norm.weight"])
    few = ["--prompts", str(heldout), "--num-prompts", "1", "--max-new-tokens", "4"]
    assert main(["evaluate", "--run-dir", str(run_dir), *few, "--ema"]) == 0
    assert json.loads((run_dir / "evaluation.json").read_text())["draft"] == "step_00000012 ema"
    capsys.readouterr()


def test_choice_that_a_run_does_not_have_is_refused(make_run: MakeRun) -> None:
    run_dir = make_run()
    _train(run_dir)
    with pytest.raises(CheckpointError, match=r"step 12 has no average; set optim\.ema_decay"):
        export_run(run_dir, Choice(ema=True))
    with pytest.raises(CheckpointError, match=r"no evaluation with a checkpoint; evaluation\.eve"):
        export_run(run_dir, Choice(best=True))


def test_evaluation_that_a_kill_prevented_is_made_after_the_resume(
    make_run: MakeRun, heldout: Path
) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)}, optim={"ema_decay": 0.9})
    _train(run_dir)
    whole = _evaluations(run_dir)
    # As a kill in the evaluation of step 8 leaves it: its checkpoint is there, its figures are not.
    shutil.rmtree(run_dir / "checkpoints" / "step_00000012")
    cut = whole | {"evaluations": [e for e in whole["evaluations"] if e["step"] == 4]}
    (run_dir / "evaluations.json").write_text(json.dumps(cut))
    assert _train(run_dir, resume=True) is TrainerExit.FINISHED
    again = _evaluations(run_dir)
    for one in (*whole["evaluations"], *again["evaluations"]):
        del one["evaluation_s"]
    assert again == whole


def test_step_is_not_evaluated_twice_by_a_resume(make_run: MakeRun, heldout: Path) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)})
    _train(run_dir)
    _train(run_dir, resume=True)
    assert [event["step"] for event in events_of(run_dir, "eval")] == [4, 8, 12]


def test_stop_ends_an_evaluation_at_the_next_prompt(make_run: MakeRun, heldout: Path) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)})
    _, config = assembly.read_manifest(run_dir)
    cpu = torch.device("cpu")
    target = assembly.load_targets(config, [cpu])["cpu"]
    sets = load_prompt_sets(config, load_tokenizer(config.target.path))
    assert [len(one.prompts) for one in sets] == [3]
    gate = CompileGate(assembly.gate_settings(config, 1))
    draft = DraftModel(assembly.draft_config(config, target))
    said: list[str] = []

    def keep_going(what: str) -> bool:
        said.append(what)
        return len(said) < 2

    assert HeldOut(sets, target, gate, config.evaluation).measure(draft, keep_going) is None
    assert said == ["decodes prompt 1/3 of heldout", "decodes prompt 2/3 of heldout"]


def test_evaluation_of_a_run_that_stops_is_left_out_and_its_checkpoint_stays(
    make_run: MakeRun, heldout: Path
) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)})
    manifest, config = assembly.read_manifest(run_dir)
    cpu = torch.device("cpu")
    target = assembly.load_targets(config, [cpu])["cpu"]
    gate = CompileGate(assembly.gate_settings(config, 1))
    attention = assembly.attention_of(config, assembly.draft_config(config, target), gate)
    place, schedule = (0, cpu), Schedule(12, 0, 0.0)
    replica = assembly.build_replica(config, target, place, attention, schedule, None)
    metrics = Metrics(run_dir / "metrics.jsonl", manifest.run_id, {}, console=io.StringIO())
    state, stop = RunState(run_dir, config.run, metrics, resume=False), StopRequest()
    sets = load_prompt_sets(config, load_tokenizer(config.target.path))
    held_out = HeldOut(sets, target, gate, config.evaluation)
    evaluator = Evaluator(held_out, 4, state, metrics, stop)
    state.done = 4
    stop.ask()
    evaluator.evaluate_when_due(replica, StepRange(0, 12, 1, 1), Pulse())
    (warning,) = events_of(run_dir, "warning")
    assert warning["text"] == "evaluation of step 4 left out: asked to stop"
    assert (state.evaluations.entries, state.saved) == ({}, 4)
    assert not (run_dir / "evaluations.json").exists()
    assert _state(run_dir, 4).step == 4
    state.done = 5  # no evaluation is due after this one
    evaluator.evaluate_when_due(replica, StepRange(0, 12, 1, 1), Pulse())
    assert state.saved == 4


def test_target_that_failed_is_not_asked_when_another_decodes(
    make_run: MakeRun, heldout: Path
) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)})
    manifest, config = assembly.read_manifest(run_dir)
    cpu = torch.device("cpu")
    broken, sound = (assembly.load_targets(config, [cpu])["cpu"] for _ in range(2))
    gate = CompileGate(assembly.gate_settings(config, 1))
    attention = assembly.attention_of(config, assembly.draft_config(config, sound), gate)
    place, schedule = (0, cpu), Schedule(12, 0, 0.0)
    replica = assembly.build_replica(config, sound, place, attention, schedule, None)
    broken.model.resize_token_embeddings(2)  # fails on every other token
    told = io.StringIO()
    metrics = Metrics(run_dir / "metrics.jsonl", manifest.run_id, {}, console=told)
    state = RunState(run_dir, config.run, metrics, resume=False)
    sets = load_prompt_sets(config, load_tokenizer(config.target.path))
    held_out = HeldOut(sets, broken, gate, config.evaluation)
    state.done = 4
    evaluator = Evaluator(held_out, 4, state, metrics, StopRequest())
    evaluator.evaluate_when_due(replica, StepRange(0, 12, 1, 1), Pulse(), sound)
    (event,) = events_of(run_dir, "eval")
    assert (event["step"], event["num_prompts"]) == (4, 3)
    assert "decoding on cpu: the thread of the first target was left out or is slow" in (
        told.getvalue().splitlines()
    )


def test_evaluation_shares_a_sealed_gate_with_the_steps(make_run: MakeRun, heldout: Path) -> None:
    run_dir = make_run(evaluation=QUICK | {"prompts": str(heldout)})
    _, config = assembly.read_manifest(run_dir)
    target = assembly.load_targets(config, [torch.device("cpu")])["cpu"]
    sets = load_prompt_sets(config, load_tokenizer(config.target.path))
    gate = CompileGate(GateSettings(backend="eager"))
    try:
        shape = assembly.draft_config(config, target)
        draft = draft_copy(DraftModel(shape, attention=FlexAttention(gate)), torch.device("cpu"))
        num_traces = gate.stats.num_exclusive  # the draft's compiled functions were made
        with gate.step(("target", "cpu")):  # what the warm-up has run
            pass
        gate.seal()
        measured = HeldOut(sets, target, gate, config.evaluation).measure(draft, lambda _what: True)
    finally:
        gate.close()
    assert measured is not None
    assert measured["num_prompts"] == 3
    # One prompt at a time on the shared side; nothing was compiled and nobody had to stand still.
    assert (gate.stats.num_shared, gate.stats.num_exclusive) == (3, num_traces + 1)
    assert (gate.stats.num_graphs, gate.stats.num_unexpected) == (0, 0)


def test_prompts_that_are_not_there_stop_the_run_before_the_target_is_loaded(
    make_run: MakeRun,
) -> None:
    run_dir = make_run(evaluation={"every_steps": 4, "prompts": "/nowhere/heldout.jsonl"})
    with pytest.raises(DataError, match=r"evaluation\.prompts\.\w+ /nowhere/heldout\.jsonl: No"):
        _train(run_dir)
    assert [event["phase"] for event in events_of(run_dir, "phase")] == ["data"]


def test_two_drafters_and_targets_evaluate_and_keep_one_average(
    make_run: MakeRun, heldout: Path
) -> None:
    sections: dict[str, Any] = {
        "evaluation": QUICK | {"prompts": str(heldout)},
        "optim": {"ema_decay": 0.9},
    }
    session = Session(make_run(drafters=2, targets=2, **sections), resume=False)
    assert session.train() is TrainerExit.FINISHED
    one, two = session.replicas
    assert (len(one.optimizer.average()) > 0, two.optimizer.average()) == (True, {})
