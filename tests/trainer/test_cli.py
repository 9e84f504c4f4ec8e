"""`python -m trainer` as a user meets it: statuses, one-line errors, evaluation and warm-up."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.__main__ import main

MakeRun = Callable[..., Path]


def test_train_evaluate_and_export_give_their_files(
    make_run: MakeRun, tiny_chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(optim={"max_steps": 120, "lr": 0.01}, run={"export_at_end": False})
    where = ["--run-dir", str(run_dir)]
    assert main(["train", *where]) == 0
    assert not (run_dir / "export").exists()
    options = ["--num-prompts", "5", "--max-new-tokens", "8", "--walk-prompts", "6"]
    assert main(["evaluate", *where, "--prompts", str(tiny_chats), *options]) == 0
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["draft"] == "step_00000120"
    assert (result["num_prompts"], result["num_walk_samples"]) == (5, 6)
    assert 1.0 <= result["acceptance_length"] <= 4.0
    assert result["walk_acceptance_length"] > 1.3  # the stored answers are what it was trained on
    assert result["lossless"] is True
    assert result["target_dtype"] == "float32"
    assert "lossless: yes (5 of 5 equal" in capsys.readouterr().out

    assert main(["train", *where, "--resume"]) == 0
    assert "the run has finished, at step 120; nothing is left to do" in capsys.readouterr().out
    assert not (run_dir / "export").exists()

    (run_dir / ".export.partial").touch()  # in the way, as a full disk would be
    assert main(["export", *where]) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{run_dir / 'export'} cannot be written" in told
    (run_dir / ".export.partial").unlink()
    assert main(["export", *where]) == 0
    assert main(["evaluate", *where, "--prompts", str(tiny_chats), *options]) == 0
    again = json.loads((run_dir / "evaluation.json").read_text())
    assert again["draft"] == "export"
    assert again["acceptance_length"] == result["acceptance_length"]
    assert again["prompts_sha256"] == result["prompts_sha256"]


def test_warmup_takes_a_real_step_and_stamps_the_cache(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(drafters=2)
    assert main(["warmup", "--run-dir", str(run_dir)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == [
        "warmup_loaded",
        "warmup",
        "warmup_note",
        "warmup_done",
    ]
    warmed, note, done = lines[1:]
    assert (warmed["device"], warmed["num_compiles"], warmed["rows"]) == ("cpu", 0, 4)
    assert warmed["row_tokens"] == 16
    assert warmed["loss"] > 0
    assert "nothing was compiled" in note["text"]
    assert (done["num_devices"], done["num_compiles"]) == (1, 0)
    stamp = json.loads((tmp_path / "cache" / "warmup.json").read_text())
    assert stamp["release"] == "0" * 64
    assert stamp["devices"][0]["device"] == "cpu"
    assert not (run_dir / "metrics.jsonl").exists()  # a launch of the same directory starts clean


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["train"], "is this a run directory"),
        (["train", "--resume"], "is this a run directory"),
        (["warmup"], "is this a run directory"),
        (["export"], "is this a run directory"),
        (["evaluate", "--prompts", "x.jsonl"], "is this a run directory"),
    ],
)
def test_wrong_directory_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert main([*options, "--run-dir", str(tmp_path)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert told in stderr
    assert stderr.count("\n") == 1


def test_export_without_a_checkpoint_says_so(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(make_run())]
    assert main(["export", *where]) == 2
    assert "has no complete checkpoint yet" in capsys.readouterr().err
    assert main(["export", *where, "--best"]) == 2
    assert "leave out --best to take the newest checkpoint" in capsys.readouterr().err


def test_prompts_file_that_is_missing_is_one_line(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(make_run()), "--prompts", str(tmp_path / "none.jsonl")]
    assert main(["evaluate", *where]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_failure_of_a_thread_is_one_error_line_then_its_traceback(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(optim={"lr": 1e30, "clip_norm": 1e30})
    assert main(["train", "--run-dir", str(run_dir)]) == 1
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: thread drafter-0: NonFiniteError: step ")
    assert second == "Traceback (most recent call last):"


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['trainer', '--help']; from trainer.__main__ import main\n"
        "try: main()\nexcept SystemExit: print([n for n in sys.modules if n == 'torch'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "train to the end of the plan" in done.stdout
    assert done.stdout.rstrip().endswith("[]")
