"""Tags, the series of tags, and where the files of a run lie."""

from pathlib import PurePosixPath

import pytest

from trainer.contract.errors import TagError
from trainer.contract.layout import Workspace, check_tag, next_tag


@pytest.mark.parametrize("tag", ["a", "fresh7", "Run_2-b", "x" * 63])
def test_plain_names_are_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag", ["", "7fresh", "-x", "a.b", "a:b", "a b", "a/b", "a\n", "ä", "x" * 64, "=a", "$a"]
)
def test_names_that_tmux_or_a_shell_could_misread_are_refused(tag: str) -> None:
    with pytest.raises(TagError, match="is not usable"):
        check_tag(tag)


@pytest.mark.parametrize(
    ("existing", "proposed"),
    [
        ([], "run1"),
        (["fresh2", "fresh6"], "fresh7"),
        (["fresh6", "fresh2"], "fresh7"),
        (["fresh6", "other9", "fresh2"], "fresh7"),
        (["other9"], "other10"),
        (["demo"], "demo2"),
        (["demo", "demo4", "demo"], "demo5"),
        (["a1b2"], "a1b3"),
    ],
)
def test_next_tag_goes_on_with_the_series_of_the_last(existing: list[str], proposed: str) -> None:
    assert next_tag(existing) == proposed


def test_next_tag_of_nothing_may_be_chosen() -> None:
    assert next_tag([], default="demo1") == "demo1"


def test_files_of_a_run_lie_where_the_contract_says() -> None:
    workspace = Workspace.at("/workspace")
    run = workspace.run("fresh7")
    root = PurePosixPath("/workspace/runs/fresh7")
    assert (workspace.release("ab"), workspace.cache("k"), workspace.rehearsal("warmup", "k")) == (
        PurePosixPath("/workspace/releases/ab"),
        PurePosixPath("/workspace/cache/k"),
        PurePosixPath("/workspace/warmup/k"),
    )
    assert run.manifest == root / "manifest.json"
    assert run.log == root / "train_stdout_fresh7.log"
    assert run.metrics == root / "metrics.jsonl"
    assert run.process == root / "process.json"
    assert run.exit == root / "exit.json"
    assert run.checkpoints == root / "checkpoints"
    assert run.export == root / "export"
    assert run.evaluation == root / "evaluation.json"
    assert run.socket == root / "tmux.sock"
    assert run.environment == root / "environment.json"
    assert run.lock == root / "run.lock"


def test_run_of_a_bad_tag_has_no_directory() -> None:
    with pytest.raises(TagError):
        Workspace.at("/workspace").run("../etc")
