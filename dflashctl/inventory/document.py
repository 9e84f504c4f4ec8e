"""A YAML text as typed values that know their line: every complaint shows where and why.

PyYAML's ``compose`` gives nodes with marks; nothing is constructed, so no YAML 1.1 surprise (a
bare ``no`` as false, 012 as ten, 22:30 as minutes) ever becomes a value.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashctl.errors import ConfigurationError

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
_LIKE_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as PyYAML counts lines
_SHOWN, _SHOWN_BEFORE = 96, 60  # characters of a long line that a message shows
_TAG = "tag:yaml.org,2002:"
_SURPRISES = {"bool": "a boolean", "int": "a number", "float": "a number", "timestamp": "a date"}


@dataclass(frozen=True)
class Source:
    """A file's text, for the line that an error shows."""

    name: str
    text: str = field(repr=False)

    def error(
        self, message: str, line: int, column: int, *, width: int = 1, hint: str = ""
    ) -> ConfigurationError:
        """Return the error for the place at ``line`` and ``column``, both counted from 0."""
        lines = _LINE_END.split(self.text)
        shown = lines[line] if line < len(lines) else ""
        left = max(0, column - _SHOWN_BEFORE)
        shown = "".join(c if c.isprintable() else "?" for c in shown[left : left + _SHOWN])
        indent = column - left
        width = max(1, min(width, len(shown) - indent))
        number = str(line + 1).rjust(5)
        picture = f"{number} | {shown}\n      | {' ' * indent}{'^' * width}"
        return ConfigurationError(
            f"{message}\n{picture}", place=f"{self.name}:{line + 1}:{column + 1}", hint=hint
        )


@dataclass(frozen=True)
class Value:
    """One YAML node, its path from the root (``hosts.kpro6.port``) and its source."""

    node: Any  # yaml.nodes.Node; the stubs know neither its id nor its style
    path: str
    source: Source

    def error(self, what: str, *, hint: str = "") -> ConfigurationError:
        """Return ``PATH: what`` at this node's place."""
        start, end = self.node.start_mark, self.node.end_mark
        width = end.column - start.column if end.line == start.line else 1
        path = f"{self.path}: " if self.path else ""
        return self.source.error(f"{path}{what}", start.line, start.column, width=width, hint=hint)

    def expected(self, what: str, *, hint: str = "") -> ConfigurationError:
        """Return ``PATH: expected what, found ...``."""
        return self.error(f"expected {what}, found {self.found}", hint=hint)

    @property
    def found(self) -> str:
        """Words for what stands here."""
        if self.is_null:
            return "nothing"
        content = self.node.value
        if isinstance(content, str):
            shown = content if len(content) <= 40 else content[:37] + "..."
            return repr(shown)
        return "a list" if self.node.id == "sequence" else "a mapping"

    @property
    def is_null(self) -> bool:
        """Whether nothing, ``null`` or ``~`` is written."""
        return bool(self.node.tag == f"{_TAG}null")

    def entries(self) -> list[tuple["Value", "Value"]]:
        """Return the pairs of a mapping whose keys are the user's own names.

        Raises: ConfigurationError when this is no mapping (null included) or a key stands twice.
        """
        if self.node.id != "mapping":
            hint = "are the lines below it indented? An empty one is {}" if self.is_null else ""
            raise self.expected("a mapping", hint=hint)
        pairs, lines = [], dict[tuple[str, str], int]()
        for key_node, value_node in self.node.value:
            key = Value(key_node, self.path, self.source)
            if not isinstance(key_node.value, str):
                raise key.expected("a plain name as key")
            identity = (key_node.tag, key_node.value)
            if identity in lines:
                raise key.error(
                    f"the key {key_node.value!r} stands already in line {lines[identity]}"
                )
            lines[identity] = key_node.start_mark.line + 1
            path = f"{self.path}.{key_node.value}" if self.path else key_node.value
            pairs.append((key, Value(value_node, path, self.source)))
        return pairs

    def mapping(self, known: Sequence[str]) -> dict[str, "Value"]:
        """Return a mapping with keys out of ``known``.

        Raises: ConfigurationError for other keys, with the nearest known one.
        """
        result: dict[str, Value] = {}
        for key, value in self.entries():
            name = key.node.value
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                if name == "<<":
                    hint = "merge keys are not read; write the settings out"
                raise key.error(f"unknown key {name!r}", hint=hint)
            result[name] = value
        return result

    def items(self, what: str = "a list") -> list["Value"]:
        """Return the items of a list."""
        if self.node.id != "sequence":
            hint = "" if self.node.id == "mapping" or self.is_null else f"write [{self.node.value}]"
            raise self.expected(what, hint=hint)
        return [
            Value(node, f"{self.path}[{index}]", self.source)
            for index, node in enumerate(self.node.value)
        ]

    def text(self, what: str = "text", *, or_integer: bool = False) -> str:
        """Return one line of text; bare values that YAML takes for something else are refused.

        ``or_integer`` lets a plain decimal integer stand for its digits (environment values).
        """
        content = self._scalar(what)
        if self.node.style is None:
            kind = self.node.tag.removeprefix(_TAG)
            plain_integer = or_integer and _INTEGER.fullmatch(content)
            if not plain_integer and (kind in _SURPRISES or _LIKE_NUMBER.fullmatch(content)):
                raise self.error(
                    f"expected {what}; YAML takes the bare {content} for "
                    f"{_SURPRISES.get(kind, 'a number')}",
                    hint=f'write it in quotes: "{content}"',
                )
        for character in content:
            if not character.isprintable():
                raise self.error(f"expected {what} on one line, found the character {character!r}")
        return content

    def name(self, what: str, pattern: str) -> str:
        """Return text that ``pattern`` matches whole."""
        content = self.text(what)
        if not re.fullmatch(pattern, content):
            raise self.expected(what)
        return content

    def choice(self, options: Sequence[str]) -> str:
        """Return one of ``options``."""
        listed = ", ".join(options)
        content = self.text(f"one of {listed}")
        if content not in options:
            near = difflib.get_close_matches(content, options, n=1)
            raise self.expected(
                f"one of {listed}", hint=f"did you mean {near[0]!r}?" if near else ""
            )
        return content

    def integer(self, low: int, high: int, what: str = "an integer") -> int:
        """Return a plain decimal integer between ``low`` and ``high``, both allowed."""
        what = f"{what} from {low} to {high}" if low < high else f"{what} {low}"
        content = self._number(what, _INTEGER)
        if not low <= int(content) <= high:
            raise self.expected(what)
        return int(content)

    def number(self, low: float, high: float, what: str = "a number") -> float:
        """Return a plain decimal number between ``low`` and ``high``, both allowed."""
        what = f"{what} from {low:g} to {high:g}"
        content = self._number(what, _NUMBER)
        if not low <= float(content) <= high:
            raise self.expected(what)
        return float(content)

    def _number(self, what: str, pattern: re.Pattern[str]) -> str:
        content = self._scalar(what)
        if self.node.style is not None and pattern.fullmatch(content):
            raise self.expected(what, hint="write it without quotes")
        # 4300 digits is where int() itself gives up
        if len(content) > 40 or not pattern.fullmatch(content):
            octal = content.lstrip("0")
            hint = (
                f"leading zeros mean octal in YAML; write {octal}"
                if octal != content and octal.isdecimal()
                else ""
            )
            raise self.expected(what, hint=hint)
        return content

    def _scalar(self, what: str) -> str:
        content = self.node.value
        if self.is_null or not isinstance(content, str):
            raise self.expected(what)
        if not self.node.tag.startswith(_TAG):
            raise self.error(f"the tag {self.node.tag} is not read here; expected {what}")
        return content


def parse_document(text: str, name: str) -> Value:
    """Return the root of the one YAML document in ``text``; ``name`` is the file for messages.

    Raises: ConfigurationError for broken YAML, an empty file, or more than one document.
    """
    import yaml

    source = Source(name, text)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        problem = error.problem or error.context or "cannot be read"
        hint = "indent with blanks, not tabs" if "'\\t'" in problem else ""
        raise source.error(f"not YAML: {problem}", line, column, hint=hint) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - before.rfind("\n") - 1
        raise source.error(
            f"not YAML: the character {chr(int(error.character))!r} is not allowed",
            before.count("\n"),
            column,
        ) from None
    except RecursionError:
        raise source.error("nested too deep to be read", 0, 0) from None
    if node is None:
        raise source.error("the file is empty", 0, 0, hint="`dflashctl init` writes a first one")
    return Value(node, "", source)


def read_document(data: bytes, name: str) -> Value:
    """Decode ``data`` as UTF-8 and parse it. Raises: as parse_document."""
    try:
        return parse_document(data.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = error.start - before.rfind(b"\n") - 1
        line = before.count(b"\n")
        place = f"{name}:{line + 1}:{column + 1}"
        raise ConfigurationError(
            f"byte 0x{data[error.start]:02x} is not UTF-8", place=place, hint="save it as UTF-8"
        ) from None
