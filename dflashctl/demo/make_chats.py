r"""Make the demo's chats: the target answers every prompt greedily, in batches.

Run with a Python that has torch and transformers:

    python -m dflashctl.demo.make_chats MODEL_DIR train dflashctl/demo/chats.jsonl
    python -m dflashctl.demo.make_chats MODEL_DIR heldout dflashctl/demo/heldout.jsonl \
        --dtype float32

MODEL_DIR is what `python -m dflashctl.demo.smollm2 MODEL_DIR` left. Answers are kept batch by
batch in `OUT.part`, so an interrupted run goes on where it stopped (with the same options;
delete that file before changing them); OUT itself appears only when it is complete.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from dflashctl.demo.prompts import Prompt, split

STOP_ID = 2  # <|im_end|>; the GGUF's tokenizer names <|im_start|> as its end
MAX_NEW_TOKENS = 112
BATCH_SIZE = 128  # on two cores 128 rows give about 16 times the tokens per second of one row
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Answer:
    """What the target said. `truncated`: cut at the token limit, so no end token followed."""

    token_ids: list[int]
    text: str
    truncated: bool


def load_target(model_dir: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Tokenizer]:
    """The target in `dtype`, ready to generate, and its tokenizer set to pad on the left."""
    # Left padding keeps the last prompt token of every row in the last column.
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    return model.eval(), tokenizer


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    questions: Sequence[str],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Answer]:
    """Greedy answers to single-turn questions, all in one batch.

    Shapes: the prompt batch is [len(questions), longest prompt], padded on the left;
    `generate` takes position ids from the attention mask, so padding moves no position.
    """
    batch = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(
        **batch,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=STOP_ID,
        pad_token_id=STOP_ID,
    )
    rows = output[:, batch["input_ids"].shape[1] :].tolist()
    return [_cut(tokenizer, row) for row in rows]


def _cut(tokenizer: Tokenizer, row: list[int]) -> Answer:
    truncated = STOP_ID not in row
    token_ids = row if truncated else row[: row.index(STOP_ID)]
    text = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
    # A cut can fall inside a character of several bytes; its half decodes to U+FFFD.
    return Answer(token_ids, text.rstrip("\ufffd") if truncated else text, truncated)


def record(prompt: Prompt, reply: Answer) -> str:
    """One JSON line of the data set, without the line end."""
    return json.dumps(
        {
            "id": prompt.prompt_id,
            "messages": [
                {"role": "user", "content": prompt.text},
                {"role": "assistant", "content": reply.text},
            ],
            "truncated": reply.truncated,
        },
        ensure_ascii=False,
    )


def batches(prompts: Sequence[Prompt], tokenizer: Tokenizer, size: int) -> list[list[Prompt]]:
    """Prompts of similar token length together. The same input gives the same batches.

    Batches are fixed because a low-precision sum can depend on the rows beside it: a resumed
    run must ask in the same company to get the same bytes.
    """
    ordered = sorted(prompts, key=lambda p: (len(tokenizer.encode(p.text)), p.prompt_id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def read_part(part: Path) -> dict[str, str]:
    """Finished lines of an interrupted run by prompt id; a half-written last line is cut off."""
    if not part.exists():
        return {}
    data = part.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(part, len(whole))
    # Not splitlines: JSON leaves U+2028 and U+0085 as they are, and those would count as ends.
    return {json.loads(line)["id"]: line for line in whole.decode().split("\n")[:-1]}


def make(
    target: tuple[PreTrainedModel, Tokenizer],
    prompts: Sequence[Prompt],
    out: Path,
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> None:
    """Answer `prompts` and write them to `out` in their order, one JSON line each."""
    model, tokenizer = target
    part = out.with_name(out.name + ".part")
    lines = read_part(part)
    plan = batches(prompts, tokenizer, batch_size)
    for number, members in enumerate(plan, start=1):
        if all(prompt.prompt_id in lines for prompt in members):
            continue
        started = time.monotonic()
        replies = answer(model, tokenizer, [prompt.text for prompt in members], max_new_tokens)
        fresh = {p.prompt_id: record(p, reply) for p, reply in zip(members, replies, strict=True)}
        _append(part, fresh.values())
        lines |= fresh
        num_tokens = sum(len(reply.token_ids) for reply in replies)
        rate = num_tokens / (time.monotonic() - started)
        sys.stderr.write(f"batch {number}/{len(plan)}: {num_tokens} tokens, {rate:.0f} per s\n")
    _replace(out, [lines[prompt.prompt_id] for prompt in prompts])
    part.unlink(missing_ok=True)


def _append(path: Path, lines: Iterable[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    _append(temporary, lines)
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dflashctl.demo.make_chats")
    parser.add_argument("model_dir", type=Path, help="what dflashctl.demo.smollm2 left")
    parser.add_argument("part", choices=("train", "heldout"), help="which prompts")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    options = parser.parse_args(argv)
    if not (options.model_dir / "config.json").is_file():
        parser.error(
            f"{options.model_dir} holds no model; "
            f"type `python -m dflashctl.demo.smollm2 {options.model_dir}`"
        )
    train, heldout = split()
    target = load_target(options.model_dir, DTYPES[options.dtype])
    prompts = train if options.part == "train" else heldout
    make(target, prompts, options.out, options.batch_size, options.max_new_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
