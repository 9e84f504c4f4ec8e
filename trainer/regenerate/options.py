"""What a regeneration was asked for: its command line and its settings."""

import argparse
import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.contract.errors import ConfigError

_OWN_FIELDS = ("messages", "model", "n", "stream")  # of a request; another value loses answers


@dataclass(frozen=True)
class Sampling:
    """What decides the answers; a resumed run must have the same. None leaves it to the server.

    thinking: on or off through the chat template's ``enable_thinking``. seed: each answer gets its
    own, made of this one, the line and the turn. extra: further fields of the request (top_k).
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name these settings in every record."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def body(self, messages: list[dict[str, Any]], line: int, turn: int) -> dict[str, Any]:
        """Return the request that asks for the answer ``turn`` of a line."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": None if self.seed is None else _answer_seed(self.seed, line, turn),
        }
        body = {"model": self.model, "messages": messages, "stream": False}
        body |= {name: value for name, value in named.items() if value is not None}
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body | self.extra


@dataclass(frozen=True)
class Options:
    """Everything that was asked for.

    retries: further tries of a question after a failure that may pass. patience_s: seconds without
    any answer after which the server counts as gone. pause_s: the first wait between two tries.
    """

    input: Path
    output: Path
    base_url: str
    sampling: Sampling
    concurrency: int = 64
    timeout_s: float = 1800.0
    retries: int = 5
    patience_s: float = 600.0
    api_key_env: str | None = None
    pause_s: float = 0.5

    def check(self) -> None:
        """Raise ConfigError naming the option that cannot be."""
        temperature, top_p = self.sampling.temperature, self.sampling.top_p
        max_tokens = self.sampling.max_tokens
        rules: list[tuple[bool, str]] = [
            (
                temperature is None or 0 <= temperature < math.inf,
                f"--temperature {temperature}: at least 0",
            ),
            (top_p is None or 0 < top_p <= 1, f"--top-p {top_p}: above 0, to 1"),
            (max_tokens is None or max_tokens >= 1, f"--max-tokens {max_tokens}: at least 1"),
            (self.concurrency >= 1, f"--concurrency {self.concurrency}: at least 1"),
            (self.retries >= 0, f"--retries {self.retries}: at least 0"),
            (self.timeout_s > 0, f"--timeout-s {self.timeout_s:g}: above 0"),
            (self.patience_s >= 0, f"--patience-s {self.patience_s:g}: at least 0"),
            (self.input.resolve() != self.output.resolve(), "--output is the --input file itself"),
            (self.output.parent.is_dir(), f"--output {self.output}: no such directory"),
        ]
        for good, text in rules:
            if not good:
                raise ConfigError(text)
        _check_url(self.base_url)
        own = [name for name in _OWN_FIELDS if name in self.sampling.extra]
        if own:
            raise ConfigError(f"--extra: {', '.join(own)} cannot be set; leave it out")

    def api_key(self) -> str | None:
        """Return the key from the environment. Raises: ConfigError when it is not there."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(f"--api-key-env {self.api_key_env}: there is no such variable")
        if not (key.isascii() and key.isprintable()):  # HTTP carries nothing else
            raise ConfigError(
                f"--api-key-env {self.api_key_env}: the key holds a line break or a letter that is"
                " no ASCII; set the variable again"
            )
        return key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m trainer regenerate``."""
    add = parser.add_argument
    add("--input", type=Path, required=True, metavar="FILE", help="JSONL of chats or prompts")
    add("--output", type=Path, required=True, metavar="FILE", help="JSONL in the input's order")
    add("--base-url", required=True, metavar="URL", help="such as http://127.0.0.1:8000/v1")
    add("--model", required=True, metavar="NAME", help="as the server names it")
    add("--temperature", type=float, metavar="X", help="0: greedy; the server's own if left out")
    add("--top-p", type=float, metavar="X")
    add("--max-tokens", type=int, metavar="N", help="longest answer; longer ones are cut")
    add("--thinking", choices=("on", "off"), help="the template's own if left out")
    add("--seed", type=int, metavar="N", help="answers drawn again are the same, if the server can")
    add("--extra", type=_json_object, default={}, metavar="JSON", help="request fields: top_k, ...")
    add("--concurrency", type=int, default=64, metavar="N", help="questions asked at one time")
    add("--timeout-s", type=float, default=1800.0, metavar="S", help="longest wait for an answer")
    add("--retries", type=int, default=5, metavar="N", help="of a question, after passing failures")
    add("--patience-s", type=float, default=600.0, metavar="S", help="longest time without answers")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")


def from_arguments(args: argparse.Namespace) -> Options:
    """Return the options of a parsed command line. Raises: ConfigError."""
    options = Options(
        input=args.input,
        output=args.output,
        base_url=args.base_url.rstrip("/"),
        sampling=Sampling(
            model=args.model,
            temperature=args.temperature,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
            thinking=None if args.thinking is None else args.thinking == "on",
            seed=args.seed,
            extra=args.extra,
        ),
        concurrency=args.concurrency,
        timeout_s=args.timeout_s,
        retries=args.retries,
        patience_s=args.patience_s,
        api_key_env=args.api_key_env,
    )
    options.check()
    return options


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('expected an object such as {"top_k": 20}')
    return value


def _answer_seed(seed: int, line: int, turn: int) -> int:
    """Return 31 bits: servers take no more, and equal prompts must not get equal answers."""
    digest = hashlib.sha256(f"{seed}:{line}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        good = False
    if not good:
        raise ConfigError(f"--base-url {url}: expected http://HOST:PORT/v1")
    if parts.username or parts.password:
        # It would stand in the process list, in the log and in the sidecar.
        raise ConfigError("--base-url holds a password; name the key's variable by --api-key-env")
