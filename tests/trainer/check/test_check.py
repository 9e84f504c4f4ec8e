"""`python -m trainer check`: what it proves, what it finds, and what it tells of a finding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import dflashctl.demo
from tests.trainer import tiny_targets
from tests.trainer.conftest import END_TOKEN_ID, MASK_TOKEN_ID
from tests.trainer.method.conftest import MASK as MASK_BYTE_ID
from tests.trainer.method.conftest import VOCAB as BYTES
from tests.trainer.method.conftest import make_byte_tokenizer
from trainer.__main__ import main
from trainer.contract.manifest import Manifest

MakeRun = Callable[..., Path]
Printed = pytest.CaptureFixture[str]


def check(run_dir: Path, capsys: Printed, *options: str) -> dict[str, Any]:
    """Run the command with --json and return its document, with its status."""
    status = main(["check", "--run-dir", str(run_dir), "--json", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document | {"status": status}


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in document["findings"]}


def failed(document: dict[str, Any]) -> list[str]:
    return [f["name"] for f in document["findings"] if f["status"] == "FAIL"]


def rewrite(run_dir: Path, section: str = "", **values: Any) -> None:
    """Change facts of the manifest, or settings of one section of its configuration."""
    path = run_dir / "manifest.json"
    manifest = Manifest.from_json(path.read_text())
    if section:
        values = {"config": manifest.config | {section: manifest.config[section] | values}}
    path.write_text(replace(manifest, **values).to_json())


def byte_run(make_run: MakeRun, path: Path, kind: str, **draft: Any) -> Path:
    """Make a run on a random target of a kind, over bytes."""
    target = path / kind
    tiny_targets.KINDS[kind](vocab_size=BYTES).save_pretrained(target)
    make_byte_tokenizer().save_pretrained(target)
    settings = {"target_layer_ids": [0, 3], "mask_token_id": MASK_BYTE_ID, "intermediate_size": 48}
    return make_run(
        target={"path": str(target)},
        data={"max_length": 96, "token_budget": 400, "packing": True},
        draft=settings | draft,
    )


def test_a_sound_run_passes_and_each_line_says_what_was_seen(
    make_run: MakeRun, capsys: Printed
) -> None:
    run_dir = make_run()
    assert main(["check", "--run-dir", str(run_dir), "--fast"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("fast check of ")
    assert ": 28 ok, 1 skipped (" in lines[-1]
    text = " ".join(" ".join(lines).split())
    assert "taps 0, 3 (the run taps 1, 3) are their layers' outputs = hidden_states[l + 1]" in text
    assert "skipped window no sliding layer" in text
    assert "theta 10000 as in the target's config.json" in text


def test_the_full_check_looks_at_the_target_itself_with_the_runs_own_widths(
    make_run: MakeRun, capsys: Printed
) -> None:
    document = check(make_run(), capsys)
    found = by_name(document)
    assert (document["status"], document["fast"]) == (0, False)
    assert "the target itself: 6 layers" in found["target"]["what"]
    assert found["layer-offset"]["what"].startswith("taps 1, 3 are their layers' outputs")
    assert "the run's own widths on the target's own taps" in found["forward-equals-decode"]["what"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("hybrid", ("--fast",)), ("vision", ("--fast",)), ("hybrid-moe", ()), ("vision", ())],
)
def test_other_kinds_of_targets_pass_small_and_whole(
    kind: str, options: tuple[str, ...], make_run: MakeRun, tmp_path: Path, capsys: Printed
) -> None:
    document = check(byte_run(make_run, tmp_path, kind), capsys, *options)
    assert failed(document) == []
    assert by_name(document)["serve-features"]["status"] == "ok"


@pytest.mark.timeout(120)
def test_the_demos_settings_pass_on_smollm2(
    make_run: MakeRun, smollm2: Path, capsys: Printed
) -> None:
    demo = Path(dflashctl.demo.__file__).parent
    settings = yaml.safe_load((demo / "train.yaml").read_text())
    settings["target"]["path"], settings["data"]["path"] = str(smollm2), str(demo / "chats.jsonl")
    document = check(make_run(**settings), capsys, "--fast")
    found = by_name(document)
    assert failed(document) == []
    assert "taps 1, 8, 14, 20, 27 of 30 layers" in found["draft-shape"]["what"]
    assert found["mask-token"]["what"].startswith("16 ('<empty_output>', reserved) is row 16 of")
    assert found["rope"]["what"].startswith("theta 100000 as in the target's config.json, 64 of")
    assert "embed_tokens.weight with 49152 rows; head tied" in found["target-files"]["what"]


@pytest.mark.parametrize("variant", ["dflash2", "domino"])
def test_every_variant_drafts_what_it_trains(
    variant: str, make_run: MakeRun, capsys: Printed
) -> None:
    two = {"layer_types": ["sliding_attention", "full_attention"], "num_draft_layers": 2}
    run_dir = make_run(draft=two | {"variant": variant, "sliding_window": 9, "block_size": 8})
    found = by_name(check(run_dir, capsys, "--fast"))
    assert {finding["status"] for finding in found.values()} == {"ok"}
    assert f"6 blocks of {variant} within" in found["forward-equals-decode"]["what"]
    assert (
        "inside a block: sliding_attention causal, full_attention bidirectional"
        in (found["causal"]["what"])
    )


def test_a_finding_names_place_and_fix_and_what_needs_it_is_skipped(
    make_run: MakeRun, capsys: Printed
) -> None:
    document = check(make_run(draft={"target_layer_ids": [1, 6]}), capsys, "--fast")
    assert (document["status"], document["ok"]) == (7, False)
    shape = by_name(document)["draft-shape"]
    assert shape["what"].startswith("draft.target_layer_ids [1, 6]: expected ascending layers of")
    assert (shape["where"], shape["fix"]) == (
        "train.yaml: draft",
        "change that setting in train.yaml",
    )
    assert by_name(document)["target"] | {"faults": []} == {
        "name": "target",
        "status": "skipped",
        "what": "draft-shape failed",
        "where": "",
        "fix": "",
        "faults": [],
        "seconds": 0.0,
    }


@pytest.mark.parametrize(
    ("mask_token_id", "told"),
    [
        (4000, "4000 has no embedding row (rows are 0..45)"),
        (END_TOKEN_ID, f"{END_TOKEN_ID} ends an answer"),
        (40, "40 is written by the chat template"),
        (7, "7 ('w7') occurs in the data: token"),
    ],
)
def test_a_mask_token_that_means_something_is_refused_with_one_that_does_not(
    mask_token_id: int, told: str, make_run: MakeRun, capsys: Printed
) -> None:
    document = check(make_run(draft={"mask_token_id": mask_token_id}), capsys, "--fast")
    finding = by_name(document)["mask-token"]
    assert (document["status"], finding["status"]) == (7, "FAIL")
    assert f"draft.mask_token_id {told}" in finding["what"]
    assert finding["where"] == "train.yaml: draft.mask_token_id"
    assert f"such as {MASK_TOKEN_ID} (<|mask|>)" in finding["fix"]


def test_the_text_of_the_mask_token_is_found_behind_the_samples_that_are_read(
    make_run: MakeRun, tiny_chats: Path, tmp_path: Path, capsys: Printed
) -> None:
    path = tmp_path / "many.jsonl"
    late = tiny_chats.read_text().splitlines()[0].replace('"w', '"<|mask|> w', 1)
    path.write_text(tiny_chats.read_text() * 5 + late + "\n")
    finding = by_name(check(make_run(data={"path": str(path)}), capsys, "--fast"))["mask-token"]
    assert finding["status"] == "FAIL"
    assert f"occurs in the data: line 121 of {path}" in finding["what"]


def test_a_head_that_the_files_do_not_hold_is_found_without_loading_them(
    make_run: MakeRun, tiny_target: Path, tmp_path: Path, capsys: Printed
) -> None:
    target = tmp_path / "untied"
    target.mkdir()
    for path in tiny_target.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    finding = by_name(check(make_run(target={"path": str(target)}), capsys, "--fast"))[
        "target-files"
    ]
    assert finding["status"] == "FAIL"
    assert "the files hold no lm_head.weight: it would be random" in finding["what"]


def test_packing_a_hybrid_without_its_kernels_is_a_finding(
    make_run: MakeRun, tmp_path: Path, capsys: Printed
) -> None:
    run_dir = byte_run(make_run, tmp_path, "hybrid")
    rewrite(run_dir, "target", batching="packed")
    document = check(run_dir, capsys, "--fast")
    assert failed(document) == ["batch-isolation"]
    finding = by_name(document)["batch-isolation"]
    assert finding["where"] == "train.yaml: target.batching"
    assert "causal_conv1d" in finding["what"]


@pytest.mark.parametrize(("options", "looked_at"), [(("--fast",), "the first 24"), ((), "24")])
def test_prepared_data_is_checked_as_a_file_is(
    options: tuple[str, ...],
    looked_at: str,
    make_run: MakeRun,
    tiny_target: Path,
    tiny_chats: Path,
    tmp_path: Path,
    capsys: Printed,
) -> None:
    prepared = tmp_path / "prepared"
    argv = ["prepare", "--input", str(tiny_chats), "--output", str(prepared)]
    argv += ["--target", str(tiny_target), "--max-length", "32", "--num-workers", "1"]
    assert main([*argv, "--no-dedup"]) == 0
    run_dir = make_run()
    rewrite(run_dir, "data", path=str(prepared))
    digest = json.loads((prepared / "dataset.json").read_text())["sha256"]
    rewrite(run_dir, dataset_sha256=digest)
    capsys.readouterr()
    document = check(run_dir, capsys, *options)
    assert failed(document) == []
    assert f"absent from {looked_at} samples" in by_name(document)["mask-token"]["what"]


def test_data_that_changed_since_its_launch_is_found(make_run: MakeRun, capsys: Printed) -> None:
    run_dir = make_run()
    rewrite(run_dir, dataset_sha256="0" * 64)
    document = check(run_dir, capsys)
    assert failed(document) == ["answers"]
    assert "the manifest 000000000000" in by_name(document)["answers"]["what"]


def test_a_check_that_passed_is_not_made_again_until_something_changes(
    make_run: MakeRun, capsys: Printed
) -> None:
    run_dir = make_run()
    first = check(run_dir, capsys, "--fast", "--reuse")
    again = check(run_dir, capsys, "--fast", "--reuse")
    assert (first["reused"], again["reused"]) == (False, True)
    assert again["findings"] == first["findings"]
    assert check(run_dir, capsys, "--fast")["reused"] is False, "only --reuse takes the record"
    rewrite(run_dir, dataset_sha256="0" * 64)
    assert check(run_dir, capsys, "--fast", "--reuse")["reused"] is False


def test_a_failed_check_and_a_damaged_record_are_never_taken_for_an_answer(
    make_run: MakeRun, capsys: Printed
) -> None:
    run_dir = make_run(draft={"mask_token_id": 7})
    for _ in range(2):
        document = check(run_dir, capsys, "--fast", "--reuse")
        assert (document["status"], document["reused"]) == (7, False)
    (run_dir / "check.json").write_text('{"key": ')
    assert check(run_dir, capsys, "--fast", "--reuse")["status"] == 7


@pytest.mark.parametrize(
    ("section", "path", "told"),
    [
        ("data", "/nowhere/chats.jsonl", "error: data.path /nowhere/chats.jsonl: No such"),
        ("target", "/nowhere/model", "error: target.path /nowhere/model: "),
    ],
)
def test_nothing_to_check_is_one_line_and_status_2(
    section: str, path: str, told: str, make_run: MakeRun, capsys: Printed
) -> None:
    run_dir = make_run()
    rewrite(run_dir, section, path=path)
    assert main(["check", "--run-dir", str(run_dir), "--fast"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(told)
    assert stderr.count("\n") == 1


def test_a_directory_that_is_no_run_is_status_2(tmp_path: Path, capsys: Printed) -> None:
    assert main(["check", "--run-dir", str(tmp_path), "--fast"]) == 2
    assert "is this a run directory" in capsys.readouterr().err


def test_a_configuration_that_the_library_refuses_in_its_own_way_is_one_line(
    make_run: MakeRun, tiny_target: Path, tmp_path: Path, capsys: Printed
) -> None:
    target = tmp_path / "damaged"
    target.mkdir()
    for path in tiny_target.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"hidden_size": None}))
    run_dir = make_run(target={"path": str(target)})
    assert main(["check", "--run-dir", str(run_dir), "--fast"]) == 2
    error = capsys.readouterr().err
    assert f"error: target.path {target}: no configuration can be read" in error
    assert "hidden_size" in error
    assert "Traceback" not in error
