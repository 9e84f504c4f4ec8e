"""Where things lie in a container's workspace.

WORKSPACE/releases/DIGEST/trainer/    immutable code
WORKSPACE/cache/KEY/                  compile caches, one per release, torch and device kind
WORKSPACE/warmup/KEY/                 manifest of a warm-up, by its cache; check/, doctor/ alike
WORKSPACE/runs/TAG/                   one run, see RunLayout
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from trainer.contract.errors import TagError

# tmux reads '.' and ':' in a session name as separators; '=' and '@' as prefixes of other meanings.
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}\Z")
_SERIES = re.compile(r"(.*?)(\d+)\Z")


def check_tag(tag: str) -> str:
    """Return ``tag`` when it is safe as a directory, log and tmux session name.

    Raises: TagError naming the tag and the rule.
    """
    if not _TAG.match(tag):
        raise TagError(
            f"tag {tag!r} is not usable: a tag is a letter followed by up to 62 letters, digits,"
            " '_' or '-' (example: fresh7)"
        )
    return tag


def next_tag(existing: Iterable[str], default: str = "run1") -> str:
    """Propose the tag after the newest of a series: fresh7 after fresh2, fresh6.

    ``existing`` is ordered oldest first; the series of the last tag is continued.
    """
    tags = list(existing)
    if not tags:
        return default
    match = _SERIES.match(tags[-1])
    stem = match[1] if match else tags[-1]
    pattern = re.compile(re.escape(stem) + r"(\d+)\Z")
    numbers = [int(found[1]) for tag in tags if (found := pattern.match(tag))]
    return check_tag(f"{stem}{max(numbers, default=1) + 1}")


@dataclass(frozen=True)
class Workspace:
    """Paths below a container's workspace; POSIX paths, never touched on the laptop."""

    root: PurePosixPath

    @classmethod
    def at(cls, path: str) -> "Workspace":
        """Make the workspace at an absolute ``path``."""
        return cls(PurePosixPath(path))

    def release(self, digest: str) -> PurePosixPath:
        """Directory that holds ``trainer/`` of the release ``digest`` (hexadecimal sha256)."""
        return self.root / "releases" / digest

    def cache(self, key: str) -> PurePosixPath:
        """Directory of the compile caches for ``key``."""
        return self.root / "cache" / key

    def rehearsal(self, command: str, key: str) -> PurePosixPath:
        """Directory of a command (warmup, check, doctor) staged for the cache ``key``."""
        return self.root / command / key

    def run(self, tag: str) -> "RunLayout":
        """Return the layout of the run ``tag``; raises TagError."""
        return RunLayout(self.root / "runs" / check_tag(tag), tag)


@dataclass(frozen=True)
class RunLayout:
    """Files of one run; every name the contract fixes is here and nowhere else."""

    root: PurePosixPath
    tag: str

    @property
    def manifest(self) -> PurePosixPath:
        """What was launched; written once by launch."""
        return self.root / "manifest.json"

    @property
    def log(self) -> PurePosixPath:
        """Everything the trainer printed."""
        return self.root / f"train_stdout_{self.tag}.log"

    @property
    def metrics(self) -> PurePosixPath:
        """Events, one JSON object a line."""
        return self.root / "metrics.jsonl"

    @property
    def process(self) -> PurePosixPath:
        """Process ids of the runner and the trainer, with start times and boot id."""
        return self.root / "process.json"

    @property
    def exit(self) -> PurePosixPath:
        """How the run ended; absent while it runs."""
        return self.root / "exit.json"

    @property
    def checkpoints(self) -> PurePosixPath:
        """Directories step_00000100, complete when they hold COMPLETE.json."""
        return self.root / "checkpoints"

    @property
    def export(self) -> PurePosixPath:
        """The draft in the z-lab layout."""
        return self.root / "export"

    @property
    def evaluation(self) -> PurePosixPath:
        """Result of the last evaluation by real decoding."""
        return self.root / "evaluation.json"

    @property
    def socket(self) -> PurePosixPath:
        """tmux server socket of this run alone."""
        return self.root / "tmux.sock"

    @property
    def environment(self) -> PurePosixPath:
        """Environment variables of the trainer, mode 0600."""
        return self.root / "environment.json"

    @property
    def lock(self) -> PurePosixPath:
        """Locked by the runner and the trainer for as long as either lives."""
        return self.root / "run.lock"
