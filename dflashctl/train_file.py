"""train.yaml and --set as one checked TrainConfig; a mistake shows its line and column.

Scalars follow YAML 1.2: true and false are booleans, 6e-4 is a number, and on, off, yes and no
are text (``compile.gate: on`` means the word).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashctl.errors import ConfigurationError
from dflashctl.inventory.document import Value, parse_document, read_document
from trainer.contract.config import TrainConfig, with_override
from trainer.contract.errors import ConfigError

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*)?(\.[0-9]+|\.)?([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"null": None, "~": None, "": None, "true": True, "false": False}


@dataclass
class _Origins:
    """Where each dotted key came from: a place in the file, or a --set on the command line."""

    values: dict[str, Value] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    has_file: bool = True

    def error(self, problem: ConfigError) -> ConfigurationError:
        """Return the contract's complaint with the place that it is about."""
        text = str(problem)
        key = re.split(r"[:\[]", text, maxsplit=1)[0].strip()
        for assigned, whole in reversed(self.assignments.items()):
            if assigned == key or (assigned.startswith(f"{key}.") and key not in self.values):
                return ConfigurationError(text, place=f"--set {whole}")
        while key and key not in self.values:
            key = key.rpartition(".")[0]
        if key:
            value = self.values[key]
            mark = value.node.start_mark
            return value.source.error(text, mark.line, mark.column)
        file = "train.yaml" if self.has_file else "a train.yaml beside hosts.yaml (there is none)"
        return ConfigurationError(
            text, hint=f"set it in {file}, or by --train FILE or --set KEY=VALUE"
        )


def read_train_config(
    path: Path | None, assignments: Sequence[str], defaults: Sequence[str] = ()
) -> TrainConfig:
    """Return the configuration of ``path`` with ``assignments`` (``key=value``) over it.

    defaults: assignments below those of the file. Raises: ConfigurationError with file:line:column
    or the --set at fault.
    """
    origins = _Origins(has_file=path is not None)
    raw: dict[str, Any] = {}
    for default in defaults:
        key, _, text = default.partition("=")
        raw = with_override(raw, key, _plain(text))
    if path is not None:
        raw = _merged(raw, _file(path, origins))
    for assignment in assignments:
        raw = _assign(raw, assignment, origins)
    try:
        return TrainConfig.from_dict(raw)
    except ConfigError as problem:
        raise origins.error(problem) from problem


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both and old is not None else value
    return result


def _file(path: Path, origins: _Origins) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the training configuration: {error.strerror}",
            place=str(path),
            hint="--train FILE names another",
        ) from error
    root = read_document(data, str(path))
    root.entries()  # raises with the place when this is no mapping
    result = _construct(root, origins)
    assert isinstance(result, dict)  # noqa: S101 - entries() has checked it
    return result


def _construct(value: Value, origins: _Origins) -> Any:
    origins.values[value.path] = value
    if value.node.id == "mapping":
        result = {}
        for key, inner in value.entries():
            origins.values[inner.path] = key  # an unknown key is shown where the key stands
            result[key.node.value] = _construct_below(inner, origins)
        return result
    if value.node.id == "sequence":
        return [_construct(item, origins) for item in value.items()]
    return value.node.value if value.node.style else _plain(value.node.value)


def _construct_below(value: Value, origins: _Origins) -> Any:
    key = origins.values[value.path]
    result = _construct(value, origins)
    origins.values[value.path] = key
    return result


def _plain(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and any(character.isdigit() for character in text):
        return float(text)
    return text


def _assign(raw: dict[str, Any], assignment: str, origins: _Origins) -> dict[str, Any]:
    key, equals, text = assignment.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigurationError(
            "expected KEY=VALUE", place=f"--set {assignment}", hint="--set optim.lr=6e-4"
        )
    try:
        value = _construct(parse_document(text, f"--set {key}"), _Origins()) if text else None
        origins.assignments[key] = assignment
        return with_override(raw, key, value)
    except ConfigError as problem:
        raise ConfigurationError(str(problem), place=f"--set {assignment}") from problem
