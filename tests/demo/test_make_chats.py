"""Making chats with a target of two layers: padding, cutting, interruption."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dflashctl.demo
from dflashctl.demo.make_chats import answer, load_target, main, make, read_part
from dflashctl.demo.prompts import split

Target = tuple[PreTrainedModel, PreTrainedTokenizerBase]

QUESTIONS = ["hi", "What is this?", "the the the hello, and a longer question than the others"]


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Target:
    return load_target(tiny_model, torch.float32)


def test_an_answer_is_the_same_alone_and_in_a_padded_batch(target: Target):
    together = answer(*target, QUESTIONS, 40)
    alone = [answer(*target, [question], 40)[0] for question in QUESTIONS]
    assert together == alone


def test_an_answer_equals_the_argmax_of_one_whole_forward_per_token(target: Target):
    model, tokenizer = target
    [reply] = answer(model, tokenizer, ["hi"], 12)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected: list[int] = []
    with torch.inference_mode():
        while len(expected) < 12:
            logits = model(torch.tensor([ids + expected]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    assert reply.token_ids == expected


def test_an_answer_at_the_limit_is_marked_and_one_that_ends_is_not(target: Target):
    model, tokenizer = target
    [cut] = answer(model, tokenizer, ["hi"], 12)
    assert cut.truncated
    assert len(cut.token_ids) == 12
    # The same model with the stop token's row copied from the first token it would say.
    head = model.get_output_embeddings().weight
    kept = head[2].clone()
    with torch.no_grad():
        head[2] = head[cut.token_ids[0]] * 2
        try:
            [ended] = answer(model, tokenizer, ["hi"], 12)
        finally:
            head[2] = kept
    assert not ended.truncated
    assert len(ended.token_ids) < 12
    assert 2 not in ended.token_ids


def test_a_line_with_unicode_line_ends_is_read_back_as_one(tmp_path: Path):
    part = tmp_path / "chats.jsonl.part"
    part.write_text('{"id": "a", "text": "one\u2028two\u0085three"}\n{"id": "b"')
    assert list(read_part(part)) == ["a"]
    assert part.read_text().endswith("}\n"), "the half line must be gone, or it joins the next"


def test_an_interrupted_run_goes_on_and_gives_the_same_file(target: Target, tmp_path: Path):
    prompts = split()[1][:10]
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    make(target, prompts, whole, batch_size=4, max_new_tokens=8)
    lines = {json.loads(line)["id"]: line for line in whole.read_text().split("\n")[:-1]}
    finished = sorted(lines)[:3]
    part = resumed.with_name("resumed.jsonl.part")
    part.write_text("".join(lines[i] + "\n" for i in finished) + lines[sorted(lines)[3]][:20])
    make(target, prompts, resumed, batch_size=4, max_new_tokens=8)
    assert resumed.read_bytes() == whole.read_bytes()
    assert [json.loads(line)["id"] for line in whole.read_text().split("\n")[:-1]] == [
        prompt.prompt_id for prompt in prompts
    ]
    assert not part.exists()


def test_a_directory_without_a_model_is_named_with_the_command_that_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none"), "heldout", str(tmp_path / "out.jsonl")])
    assert ended.value.code == 2
    assert f"python -m dflashctl.demo.smollm2 {tmp_path / 'none'}" in capsys.readouterr().err


# Kills itself when it is about to write the answers of the third batch.
DIES_AT_THE_THIRD_BATCH = """
import os, signal, sys
from dflashctl.demo.make_chats import main
opened = []
def die(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".part") and arguments[1] == "a":
        opened.append(arguments)
        if len(opened) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_kill_leaves_no_file_and_the_rerun_completes_it(tiny_model: Path, tmp_path: Path):
    out = tmp_path / "heldout.jsonl"
    part = tmp_path / "heldout.jsonl.part"
    options = [str(tiny_model), "heldout", str(out)]
    options += ["--batch-size", "8", "--max-new-tokens", "16", "--dtype", "float32"]
    argv = [sys.executable, "-c", DIES_AT_THE_THIRD_BATCH, *options]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(part.read_text().split("\n")[:-1]) == 16
    assert not out.exists()
    argv = [sys.executable, "-m", "dflashctl.demo.make_chats", *options]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"batch 2/" not in done.stderr
    assert b"batch 3/" in done.stderr
    assert len(out.read_text().split("\n")[:-1]) == 80
    assert not part.exists()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_held_out_answers_are_what_the_real_target_says_alone_in_fp32(smollm2: Path):
    heldout = Path(dflashctl.demo.__file__).parent / "heldout.jsonl"
    records = [json.loads(line) for line in heldout.read_text().split("\n")[:-1]]
    shortest = sorted(records, key=lambda record: len(record["messages"][1]["content"]))[:4]
    target = load_target(smollm2, torch.float32)
    for record in shortest:
        question, expected = (message["content"] for message in record["messages"])
        assert answer(*target, [question])[0].text == expected
