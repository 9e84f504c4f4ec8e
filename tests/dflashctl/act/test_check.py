"""check, and the check that launch makes first: a stand-in trainer answers, all else is real."""

import json
from pathlib import Path

from tests.dflashctl.act.conftest import Project, names


def calls(project: Project) -> list[str]:
    """Return the stand-in's record of its checks: whether fast, and the GPUs it was shown."""
    (directory,) = Path(project.workspace, "check").iterdir()
    return (directory / "calls").read_text().splitlines()


def test_check_shows_a_line_for_each_finding_and_leaves_no_run(deployed: Project) -> None:
    done = deployed.run("check", "--fast")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ok       rope        theta 10000",
        "ok       mask-token  1 is free",
        "here/self  fast check passed: 2 ok  (t, 0.1 s)",
    ]
    assert "a library speaks" in done.stderr
    assert not Path(deployed.workspace, "runs").exists()
    assert not (deployed.root / "runs").exists()


def test_a_failed_check_exits_7_with_where_and_fix(deployed: Project) -> None:
    done = deployed.run("check", "--set", "seed=7")
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        "ok       rope        theta 10000",
        "FAIL     mask-token  draft.mask_token_id 1 ends an answer",
        "         where  train.yaml: draft.mask_token_id",
        "         fix    set draft.mask_token_id to another id",
        "here/self  check 1 failed: 1 ok  (t, 0.1 s)",
    ]
    document = deployed.document("check", "--fast", "--set", "seed=7")
    assert (document["rc"], document["ok"]) == (7, False)
    assert document["check"]["fast"] is True
    assert document["check"]["findings"][1]["fix"] == "set draft.mask_token_id to another id"


def test_launch_makes_the_fast_check_before_anything_exists_under_the_tag(
    deployed: Project,
) -> None:
    refused = deployed.run("launch", "--tag", "x", "--set", "seed=7")
    assert refused.returncode == 3
    assert refused.stderr.endswith(
        "error[check-failed]: here/self: the check found 1 fault: mask-token: draft.mask_token_id 1"
        " ends an answer (train.yaml: draft.mask_token_id)\n"
        "  hint: mask-token: set draft.mask_token_id to another id\n"
        "        dflashctl check shows all; --skip-check launches all the same\n"
    )
    assert calls(deployed) == ["True "]  # fast, and without a GPU
    assert not deployed.run_dir("x").exists()
    assert not (deployed.root / "runs").exists(), "a refused launch leaves no record"


def test_the_manifest_says_whether_the_check_passed_or_was_skipped(deployed: Project) -> None:
    few = ("-v", "--set", "optim.max_steps=2")
    passed = deployed.run("--json", "launch", "--tag", "x", *few)
    assert json.loads(passed.stdout)["manifest"]["check"] == "passed"
    assert "check passed: 2 ok\n" in passed.stderr
    skipped = deployed.run("launch", "--tag", "y", "--skip-check", "--set", "seed=7", *few)
    assert skipped.returncode == 0, skipped.stderr
    assert "  check       skipped\n" in skipped.stdout
    assert "the check is skipped; the manifest says so" in skipped.stderr
    there = json.loads((deployed.run_dir("y") / "manifest.json").read_text())
    assert there["check"] == "skipped"
    assert calls(deployed) == ["True "], "skipped means not made"
    assert names(deployed.root / "runs") == ["x", "y"]
    trips = [int(done.stderr.splitlines()[-1].split()[0]) for done in (passed, skipped)]
    assert trips[0] == trips[1] + 1, "a check is one round trip"


def test_resume_takes_no_skip_check(deployed: Project) -> None:
    done = deployed.run("launch", "--resume", "x", "--skip-check")
    assert done.returncode == 2
    assert "--skip-check" in done.stderr


def test_a_check_that_breaks_starts_nothing_and_tells_the_trainers_words(
    deployed: Project,
) -> None:
    broken = deployed.run("launch", "--tag", "x", "--set", "seed=8")
    assert broken.returncode == 1
    assert "check failed" in broken.stderr
    assert "error: no torch here" in broken.stderr
    silent = deployed.run("check", "--set", "seed=9")
    assert silent.returncode == 1
    assert "gave no report that can be read" in silent.stderr
    assert not deployed.run_dir("x").exists()
