"""What a prepared directory is made from, and why another input or option does not belong in it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.contract.completion import digest_file
from trainer.contract.durable import write_by_rename
from trainer.data.dataset import template_digest, tokenizer_digest
from trainer.data.prepare_options import PrepareOptions
from trainer.data.progress import Progress
from trainer.data.shards import WORK
from trainer.data.sources import Source, find_inputs, scan
from trainer.errors import DataError

_PROVENANCE = "provenance.json"
_FLAGS = {  # options as a person types them, for what has changed
    "max_length": "--max-length",
    "truncation": "--truncation",
    "thinking": "--thinking",
    "dedup": "--dedup",
    "shard_samples": "--shard-samples",
}


@dataclass(frozen=True)
class Provenance:
    """Everything that the shards depend on; a directory belongs to one."""

    options: dict[str, Any]
    tokenizer_sha256: str
    template_sha256: str
    sources: tuple[Source, ...]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Provenance":
        """Read what ``asdict`` wrote as JSON."""
        sources = tuple(Source(**one | {"starts": tuple(one["starts"])}) for one in raw["sources"])
        return cls(raw["options"], raw["tokenizer_sha256"], raw["template_sha256"], sources)

    def changes(self, now: "Provenance") -> list[str]:
        """Say what differs in ``now``; files count by their bytes, not by their names."""
        told = [
            f"{_FLAGS[key]} was {value}, is {now.options[key]}"
            for key, value in self.options.items()
            if now.options[key] != value
        ]
        if now.tokenizer_sha256 != self.tokenizer_sha256:
            told.append("the target's tokenizer differs")
        if now.template_sha256 != self.template_sha256:
            told.append("the target's chat template differs")
        if len(self.sources) != len(now.sources):
            told.append(f"there were {len(self.sources)} input files, are {len(now.sources)}")
            return told
        for old, new in zip(self.sources, now.sources, strict=True):
            if old.sha256 != new.sha256:
                told.append(f"{new.path} holds other bytes than {old.path} did")
        return told


def settle(options: PrepareOptions, tokenizer: Any, finished: dict[str, Any] | None) -> Provenance:
    """Return the provenance of the directory, which a new one gets; refuse any other."""
    path = options.output / WORK / _PROVENANCE
    old: Provenance | None = None
    if finished is not None:
        old = Provenance.from_dict(finished["made"]["provenance"])
    elif path.is_file():
        old = Provenance.from_dict(json.loads(path.read_text()))
    known = {source.path: source for source in old.sources} if old else {}
    sizes = {name: getattr(options, name) for name in _FLAGS}
    digests = tokenizer_digest(tokenizer), template_digest(tokenizer)
    if old is not None:  # before reading gigabytes for nothing
        _refuse_changes(options.output, old, Provenance(sizes, *digests, old.sources), finished)
    sources = _scan_all(options, known)
    origin = Provenance(sizes, *digests, sources)
    if old is not None:
        _refuse_changes(options.output, old, origin, finished)
    else:
        write_by_rename(path, json.dumps(asdict(origin)).encode())
    return origin


def _refuse_changes(
    output: Path, old: Provenance, new: Provenance, finished: dict[str, Any] | None
) -> None:
    changes = old.changes(new)
    if changes:
        state = "is half done" if finished is None else "is finished"
        raise DataError(
            f"--output {output} {state} and belongs to another input or option:"
            f" {'; '.join(changes)}; give another --output, or remove it"
        )


def _scan_all(options: PrepareOptions, known: dict[str, Source]) -> tuple[Source, ...]:
    """Read every input once; one of the size and time that an earlier run saw is not read again."""
    found = [(path.resolve(), kind) for path, kind in find_inputs(options.inputs)]
    stats = [path.stat() for path, _ in found]
    progress = Progress("read", sum(stat.st_size for stat in stats), "bytes")
    sources: list[Source] = []
    for (path, kind), stat in zip(found, stats, strict=True):
        source = known.get(str(path))
        same = source is not None and (source.size_bytes, source.mtime_ns) == (
            stat.st_size,
            stat.st_mtime_ns,
        )
        if source is not None and same:
            progress.skip(stat.st_size)
        else:
            source = scan(path, kind, options.shard_samples, progress.advance)
        sources.append(source)
    return tuple(sources)


def require_unchanged(sources: Sequence[Source]) -> None:
    """Raise DataError when an input changed while it was read."""
    for source in sources:
        stat = Path(source.path).stat()
        changed = (stat.st_size, stat.st_mtime_ns) != (source.size_bytes, source.mtime_ns)
        if changed and digest_file(Path(source.path)) != source.sha256:
            raise DataError(f"--input {source.path} has changed meanwhile; prepare it anew")
