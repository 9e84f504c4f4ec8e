"""train.yaml and --set: values, and where a mistake is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.errors import ConfigurationError
from dflashctl.train_file import read_train_config

GOOD = """\
target: {path: /models/t}
data: {path: /d.jsonl}
draft:
  mask_token_id: 7
optim:
  lr: 6e-4
compile:
  gate: on
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "train.yaml"
    path.write_text(text)
    return path


def test_scalars_mean_what_yaml_1_2_says(tmp_path: Path) -> None:
    config = read_train_config(write(tmp_path, GOOD), [])
    assert config.optim.lr == 0.0006
    assert config.compile.gate == "on"
    assert (config.target.path, config.draft.mask_token_id) == ("/models/t", 7)


def test_set_goes_over_the_file_and_defaults_below_it(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    sets = ["optim.lr=1e-3", "data.packing=false", "draft.target_layer_ids=[1, 8]", "seed=4"]
    config = read_train_config(path, sets, ["run.device=cpu", "optim.lr=9"])
    assert (config.optim.lr, config.data.packing, config.seed) == (0.001, False, 4)
    assert config.draft.target_layer_ids == (1, 8)
    assert config.run.device == "cpu"
    assert read_train_config(path, ["optim.max_steps="]).optim.max_steps is None


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("  lr: 6e-4", "  lrr: 6e-4", "6:3", "optim.lrr: unknown key; did you mean lr?"),
        ("  lr: 6e-4", "  lr: fast", "6:3", "optim.lr: expected float, got 'fast'"),
        ("  lr: 6e-4", "  lr: -1", "6:3", "optim.lr: expected above 0"),
        ("  gate: on", "  gate: maybe", "8:3", "compile.gate: expected one of on, off"),
        ("optim:", "optimm:", "5:1", "optimm: unknown key; did you mean optim?"),
        ("  mask_token_id: 7", "  mask_token_id: 7\n  mask_token_id: 8", "5:3", "line 4"),
        ("target: {path: /models/t}", "target: {path: [}", "1:17", "not YAML"),
    ],
)
def test_a_mistake_is_shown_at_its_line_and_column(
    tmp_path: Path, old: str, new: str, place: str, words: str
) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        read_train_config(path, [])
    assert caught.value.place == f"{path}:{place}"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("optim.lr", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("optim.lr=fast", "expected float"),
        ("optim.lrr=3", "did you mean lr?"),
        ("optim.lr.x=3", "lr is a value, not a section"),
        ("unknwon.x=3", "unknwon: unknown key"),
        ("optim.betas.x=3", "optim.betas: expected a list"),
        ("draft.target_layer_ids=[1", "not YAML"),
    ],
)
def test_a_wrong_set_is_named(tmp_path: Path, assignment: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_train_config(write(tmp_path, GOOD), [assignment])
    assert "--set" in caught.value.place
    assert words in str(caught.value)


def test_a_missing_file_and_a_missing_setting_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the training configuration"):
        read_train_config(tmp_path / "no.yaml", [])
    with pytest.raises(ConfigurationError, match=r"target\.path") as caught:
        read_train_config(None, [])
    assert "--train FILE" in caught.value.hint
    assert "there is none" in caught.value.hint
    with pytest.raises(ConfigurationError, match=r"target\.path") as caught:
        read_train_config(write(tmp_path, "seed: 1\n"), [])
    assert "there is none" not in caught.value.hint


@given(text=st.text(max_size=60), assignment=st.text(max_size=20))
def test_any_text_gives_a_configuration_or_a_configuration_error(
    tmp_path_factory: pytest.TempPathFactory, text: str, assignment: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for sets in ([], [assignment], [f"optim.lr={assignment}"]):
        try:
            read_train_config(path, sets)
        except ConfigurationError:
            continue
