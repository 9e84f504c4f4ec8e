"""Builds dataclasses from plain values; what does not fit is named by its dotted key."""

import contextlib
import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer.contract.errors import ConfigError


def build(kind: type[Any], raw: Any, path: str) -> Any:
    """Return a ``kind`` with the values of ``raw``; ``path`` is its dotted key.

    Raises: ConfigError.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path or 'the configuration'}: expected a mapping, got {raw!r}")
    hints, known = get_type_hints(kind), [f.name for f in fields(kind)]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        dotted = f"{path}.{key}" if path else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"{dotted}: unknown key{hint}")
        values[key] = _convert(hints[key], value, dotted)
    return kind(**values)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, path)
    or_null = ""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(h for h in get_args(hint) if h is not type(None))
        or_null = " or null"
    if get_origin(hint) is dict:
        return _paths(value, path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: expected a list, got {value!r}")
        arms = get_args(hint)
        if arms[-1] is not Ellipsis and len(arms) != len(value):
            raise ConfigError(f"{path}: expected {len(arms)} values, got {value!r}")
        return tuple(_convert(arms[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 6e-4 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{path}: expected {hint.__name__}{or_null}, got {value!r}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value!r}")
    return value


def _paths(value: Any, path: str) -> dict[str, str]:
    """Return files by name; a single path is named after its file."""
    if isinstance(value, str):
        return {PurePosixPath(value).stem: value} if value else {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a path, or paths by name, got {value!r}")
    for name, file in value.items():
        if not isinstance(name, str) or not isinstance(file, str) or not (name and file):
            raise ConfigError(f"{path}.{name}: expected a path, got {file!r}")
    return dict(value)
