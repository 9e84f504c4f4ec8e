"""What the demo decides by itself: the name of its run, and whether the outcome is good."""

from pathlib import Path

import pytest

from dflashctl.demo.orchestrate import check_outcome, next_demo_tag
from dflashctl.errors import DflashctlError


@pytest.mark.parametrize(
    ("present", "tag"),
    [
        ([], "demo1"),
        (["demo1", "demo2", "demo10"], "demo11"),
        (["demo", "demo-old", "demo_x3", "demonstration", "demo3"], "demo4"),
        (["demo-old"], "demo1"),
    ],
)
def test_demo_takes_the_tag_after_its_own_highest(
    tmp_path: Path, present: list[str], tag: str
) -> None:
    for name in present:
        (tmp_path / name).mkdir()
    assert next_demo_tag(tmp_path) == tag
    assert next_demo_tag(tmp_path / "none") == "demo1"


def test_outcome_says_what_was_reached_and_what_was_expected() -> None:
    check_outcome({"lossless": True, "acceptance_length": 1.61}, 1.6)
    with pytest.raises(DflashctlError, match=r"is 1\.02; .* passes 1\.6") as caught:
        check_outcome({"lossless": True, "acceptance_length": 1.02}, 1.6)
    assert "--set" in caught.value.hint
    with pytest.raises(DflashctlError, match="differ from plain greedy"):
        check_outcome({"lossless": False, "acceptance_length": 2.0}, 1.6)
