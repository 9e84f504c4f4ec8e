"""`python -m trainer doctor` on tiny runs: figures worked out by hand, and what it must refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import MASK_TOKEN_ID
from trainer import assembly
from trainer.__main__ import main
from trainer.contract.events import EventWriter
from trainer.contract.manifest import Manifest
from trainer.doctor import room
from trainer.doctor.report import Report, diagnose

MakeRun = Callable[..., Path]
# The draft of make_run: width 32, inner 64, 2 taps, 4 heads and 2 kv heads of 8, one layer.
#   fc 64 * 32, two norms 2 * 32; layer: two norms 2 * 32, q and o 2 * 32 * 32, k and v 2 * 32 * 16,
#   two head norms 2 * 8, inner products 3 * 64 * 32
DRAFT_NUMBERS = 2048 + 64 + 64 + 2048 + 1024 + 16 + 6144


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A chat of |question| + |answer| + 4 tokens, of which |answer| + 1 are trained."""
    roles = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return {"messages": list(roles)} | more


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{(first + i) % 40}" for i in range(count))


def write(path: Path, records: list[Any]) -> dict[str, str]:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return {"path": str(path)}


def look(run_dir: Path, num_samples: int = 0) -> Report:
    manifest, config = assembly.read_manifest(run_dir)
    return diagnose(manifest, config, run_dir, num_samples)


def found(report: Report) -> list[tuple[str, str]]:
    return [(finding.level, finding.name) for finding in report.findings]


def test_figures_of_a_sound_run_are_those_worked_out_by_hand(make_run: MakeRun, tmp_path: Path):
    records = [chat(words(2), words(4, first)) for first in range(10)]
    data = write(tmp_path / "chats.jsonl", records) | {"max_batch_size": 2}
    report = look(make_run(data=data, optim={"epochs": 3.0, "max_steps": None}))
    assert (report.ok, found(report)) == (True, [])
    facts, plan = report.data, report.plan
    assert facts is not None
    assert plan is not None
    assert (facts.num_samples, facts.num_tokens, facts.num_supervised) == (10, 100, 50)
    assert facts.supervised_frac == pytest.approx(50 / 100)
    assert facts.lengths == {"median": 10, "p90": 10, "p99": 10, "longest": 10}
    assert facts.histogram[:4] == ((4, 0), (8, 0), (12, 10), (16, 0))
    assert (facts.num_at_max, facts.num_duplicates, facts.mask_token.num_samples) == (0, 0, 0)
    assert (plan.batches_in_epoch, plan.batches_per_step, plan.num_steps) == (5, 1, 15)
    assert (plan.steps_in_epoch, plan.num_warmup_steps) == (5.0, 1)  # 4 % of 15, rounded
    # Five trained tokens have four places for an anchor, and data.max_anchors is 4.
    assert (plan.tokens_per_step, plan.anchors_per_step) == (20.0, 8.0)
    # All places are drawn, so all but each answer's first token are covered.
    assert plan.coverage.per_epoch == pytest.approx(4 / 5)
    assert report.hours is not None
    assert report.hours.hours is None
    assert report.hours.source.startswith("unknown")


def test_sizes_are_those_worked_out_by_hand(make_run: MakeRun):
    settings = {"optim": {"ema_decay": 0.9}, "target": {"cache_bytes": 1 << 20}}
    report = look(make_run(run={"keep_checkpoints": 2}, **settings))
    assert report.disk is not None
    assert report.host is not None
    assert report.disk.checkpoint_bytes == 4 * DRAFT_NUMBERS * 4  # masters, two moments, average
    assert report.disk.num_checkpoints == 3
    assert report.disk.export_bytes == 4 * DRAFT_NUMBERS
    drafter, target = report.devices["drafter"].parts, report.devices["target"].parts
    assert drafter["weights"] == 0  # fp32 weights are the masters themselves
    assert drafter["fp32 masters"] == 4 * DRAFT_NUMBERS
    assert drafter["optimiser moments"] == 8 * DRAFT_NUMBERS
    assert drafter["moving average"] == 4 * DRAFT_NUMBERS
    assert drafter["target's embedding and head"] == 46 * 32 * 4  # tied: once
    taps = 64 * 2 * 32 * 4  # budget, taps, width, fp32
    assert target["taps of three batches"] == taps * 4  # and the copy that joins documents
    assert drafter["taps in the queue"] == taps * 2
    assert report.data is not None
    assert report.host.features_bytes == report.data.num_tokens * 2 * 32 * 4
    assert report.devices["drafter"].card.total_bytes is None


@pytest.mark.parametrize(
    ("device", "name", "each"), [("cuda", "adamw", 2), ("cuda", "muon", 4), ("cpu", "adamw", 4)]
)
def test_bf16_weights_on_a_gpu_are_half_of_their_masters_with_adamw(
    make_run: MakeRun, device: str, name: str, each: int
):
    report = look(
        make_run(draft={"dtype": "bfloat16"}, run={"device": device}, optim={"name": name})
    )
    parts = report.devices["drafter"].parts
    assert parts["weights"] == 2 * DRAFT_NUMBERS
    assert parts["fp32 masters"] == each * DRAFT_NUMBERS


def test_muon_keeps_one_number_for_each_weight_of_a_layers_matrix(make_run: MakeRun):
    disk = look(make_run(optim={"name": "muon"})).disk
    matrices = 2048 + 1024 + 6144  # q, k, v, o and the inner products
    assert disk is not None
    assert disk.checkpoint_bytes == 4 * (DRAFT_NUMBERS * 3 - matrices)


def test_told_checkpoint_is_as_large_as_the_one_that_is_written(make_run: MakeRun):
    run_dir = make_run(optim={"max_steps": 4})
    told = look(run_dir).disk
    assert told is not None
    assert main(["train", "--run-dir", str(run_dir)]) == 0
    written = sum(p.stat().st_size for p in (run_dir / "checkpoints" / "step_00000004").iterdir())
    assert told.checkpoint_bytes <= written <= told.checkpoint_bytes + 20_000  # headers, RNG state
    export = (run_dir / "export" / "model.safetensors").stat().st_size
    assert told.export_bytes <= export <= told.export_bytes + 4_000


def test_mask_token_in_data_is_a_problem_that_names_the_place(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    records = [chat(words(2), words(5)), chat("w1 <|mask|>", words(5)), chat("w1", words(6))]
    run_dir = make_run(data=write(tmp_path / "chats.jsonl", records))
    assert main(["doctor", "--run-dir", str(run_dir), "--samples", "0"]) == 7
    told = capsys.readouterr().out
    assert f"1 samples hold the mask token {MASK_TOKEN_ID}, first sample 1 at token 2" in told
    assert "fix: set draft.mask_token_id" in told
    assert "steps" in told  # the rest is told all the same
    assert told.endswith("NOT ready: 1 problem, 0 warnings\n")


def test_hardly_any_trained_token_is_a_problem(make_run: MakeRun, tmp_path: Path):
    data = write(tmp_path / "chats.jsonl", [chat(words(230, n), words(2)) for n in range(4)])
    report = look(make_run(data=data | {"max_length": 256, "token_budget": 512}))
    assert found(report) == [("problem", "mask-fraction")]
    assert "only 1.27%" in report.findings[0].what  # 3 of 236
    assert not report.ok


def test_trained_prompts_are_warned_about(make_run: MakeRun, tmp_path: Path):
    data = write(tmp_path / "chats.jsonl", [chat("w1", words(200, n)) for n in range(4)])
    report = look(make_run(data=data | {"max_length": 256, "token_budget": 512}))
    assert ("warning", "mask-fraction") in found(report)  # 201 of 205
    assert report.ok


def test_data_without_a_usable_chat_is_a_problem(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = make_run(data=write(tmp_path / "chats.jsonl", ["{", '{"messages": []}']))
    assert main(["doctor", "--run-dir", str(run_dir), "--json"]) == 7
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["ok"], document["data"]) == ("doctor", False, None)
    (finding,) = document["findings"]
    assert (finding["level"], finding["name"]) == ("problem", "data")
    assert "no usable chat (line 1: not JSON" in finding["what"]


def test_less_than_one_step_is_a_problem(make_run: MakeRun, tmp_path: Path):
    data = write(tmp_path / "chats.jsonl", [chat(words(2), words(5))])
    report = look(make_run(data=data, drafters=3, optim={"epochs": 1.0, "max_steps": None}))
    assert found(report) == [("problem", "steps")]
    assert "less than one step of 3 drafters" in report.findings[0].what


def test_disk_that_cannot_hold_the_checkpoints_is_a_problem(make_run: MakeRun):
    report = look(make_run(draft={"intermediate_size": 10**12}))
    assert found(report) == [("problem", "disk")]
    assert "are needed (4 checkpoints of" in report.findings[0].what
    assert "run.keep_checkpoints" in report.findings[0].fix


def test_bad_lines_cuts_duplicates_and_few_anchors_are_warnings_with_a_fix(
    make_run: MakeRun, tmp_path: Path
):
    long = [chat("w1", words(60, n)) for n in range(3)]  # 65 tokens, cut at 32
    records = ["{", chat("w1", words(5)), chat("w1", words(5)), *long]
    data = write(tmp_path / "chats.jsonl", records)
    report = look(make_run(data=data | {"max_anchors": 1}))
    names = ["bad-lines", "cut", "duplicates", "coverage"]
    assert found(report) == [("warning", name) for name in names]
    told = {finding.name: finding for finding in report.findings}
    assert told["bad-lines"].what.startswith("1 lines gave no sample: line 1: not JSON")
    assert told["cut"].what == "60% of the samples are cut at data.max_length 32"
    assert told["duplicates"].what == "1 of 5 samples occur a second time"
    assert "raise data.max_anchors (1)" in told["coverage"].fix
    assert report.ok


def test_hours_come_from_the_last_steps_of_a_like_run(make_run: MakeRun):
    earlier = make_run("earlier")
    events = EventWriter(earlier / "metrics.jsonl", "earlier-0001")
    for step, step_s in enumerate([90.0, 30.0, 2.0, 2.5, 3.0]):
        events.write("step", step=step, step_s=step_s)
    events.close()
    other = make_run("other", data={"max_anchors": 2})
    now = make_run("now", optim={"max_steps": 1440, "epochs": 1e6})
    (other / "metrics.jsonl").write_bytes((earlier / "metrics.jsonl").read_bytes())
    hours = look(now).hours
    assert hours is not None
    # Median of 30, 2, 2.5 and 3: the first event of what is read may hold a compile.
    assert (hours.step_s, hours.hours) == (2.75, 1440 * 2.75 / 3600)
    assert hours.source == "the last 4 steps of earlier"
    unlike = look(make_run("unlike", data={"max_anchors": 3})).hours
    assert unlike is not None
    assert unlike.hours is None


def test_target_gives_a_score_and_the_time_of_a_step(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
):
    run_dir = make_run()
    assert main(["doctor", "--run-dir", str(run_dir), "--samples", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    score = document["on_policy"]
    assert score["num_samples"] == 3
    assert 0.0 <= score["agreement"] <= 1.0
    assert score["mean_log_prob"] < 0 < score["mean_entropy"]
    assert document["hours"]["step_s"] > 0
    assert document["hours"]["source"] == "2 steps timed now"
    assert document["devices"]["target"]["parts"]["weights"] > 40_000
    # tiny_chats count upwards; a random target would not have written that
    assert [f["name"] for f in document["findings"] if f["level"] == "warning"] == ["on-policy"]
    assert document["text"].endswith("ready: 0 problems, 1 warning\n")


def test_gpu_that_is_too_small_and_memory_that_is_short_are_warned_about():
    card = room.Card("cuda:1", "NVIDIA X", 1000)
    small = room.DeviceFacts(card, {"weights": 900, "moments": 100})
    host = room.HostFacts(available_bytes=50, cache_bytes=100, features_bytes=80, data_bytes=1)
    findings = room.room_findings(None, host, {"drafter": small})
    assert [finding.name for finding in findings] == ["host-memory", "gpu-memory"]
    assert "the largest part: weights" in findings[1].what
    assert "data.max_anchors" in findings[1].fix
    roomy = room.DeviceFacts(card, {"weights": 900})
    other = room.DeviceFacts(room.Card("cuda:0", "NVIDIA X", 1000), {"weights": 900})
    assert room.room_findings(None, None, {"drafter": roomy, "target": other}) == []
    (both,) = room.room_findings(None, None, {"drafter": roomy, "target": roomy})
    assert (both.where, both.fix) == ("drafter and target", "give each role its own GPU")


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8192 * 1024), ("5000000", 4_000_000), ("", 8192 * 1024)]
)
def test_available_memory_heeds_the_containers_limit(tmp_path: Path, limit: str, expected: int):
    (tmp_path / "meminfo").write_text("MemTotal: 16384 kB\nMemAvailable:    8192 kB\n")
    if limit:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000000\n")
    assert room.available_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_report_of_prepared_shards_is_that_of_their_chats(
    make_run: MakeRun, tiny_chats: Path, tiny_target: Path, tmp_path: Path
):
    shards = tmp_path / "shards"
    argv = ["--input", str(tiny_chats), "--output", str(shards), "--target", str(tiny_target)]
    assert main(["prepare", *argv, "--max-length", "32", "--num-workers", "1"]) == 0
    chats = look(make_run("chats")).data
    run_dir = make_run("shards")
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["config"]["data"]["path"] = str(shards)
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    prepared = look(run_dir).data
    assert chats is not None
    assert prepared is not None
    for name in ("num_samples", "num_tokens", "num_supervised", "lengths", "thinking"):
        assert getattr(prepared, name) == getattr(chats, name), name


def test_negative_number_of_samples_is_one_line_and_status_2(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor", "--run-dir", str(make_run()), "--samples", "-1"]) == 2
    assert capsys.readouterr().err == "error: --samples -1: at least 0\n"


def test_manifest_is_all_that_the_doctor_needs_in_the_directory(make_run: MakeRun):
    run_dir = make_run()
    look(run_dir)
    assert [path.name for path in run_dir.iterdir()] == ["manifest.json"]
    assert Manifest.from_json((run_dir / "manifest.json").read_text()).tag == "tiny"
