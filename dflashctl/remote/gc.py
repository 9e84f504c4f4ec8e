"""Finds what nothing in a workspace needs any more, and removes what was found before.

argv[1]: {"action": "plan" | "remove", "workspace", "release": digest that the asking laptop would
deploy, "keep": complete checkpoints of an ended run, null for all}. ``plan`` changes nothing and
prints {"items": [{path, kind, num_bytes, why, state, lock}], "kept": [{path, why}], "free_bytes"}.
``remove`` reads such items as JSON on stdin and prints {"removed", "left", "failed", "free_bytes"}:
each is looked at again under the workspace's launch lock and its own lock, and goes only when it
would be planned again and is as it was. It is renamed to ``.trash-PID-NAME`` beside its place, then
deleted: a kill leaves nothing half, and the next plan finds that trash. Links are not followed.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflashctl.remote.checkpoints import is_complete
from dflashctl.remote.liveness import is_locked
from dflashctl.remote.processes import start_ticks

LOCK_WAIT_S = 30.0
STALE_S = 86400.0  # what is half written and younger may still be written, from wherever
RECENT_S = 600.0  # a launch makes its check, then starts: until then only the check names a release
STAGED = ("warmup", "check", "doctor")
OWN = {"releases", "runs", "cache", "envs", *STAGED}  # what has rules of its own, or none
TRASH = re.compile(r"\.trash-\d+-(.+)\Z", re.DOTALL)
CACHE = re.compile(r"([0-9a-f]{12})-torch")  # as a manifest's cache_dir is named
STEP = re.compile(r"step_(\d{8,})\Z")
UPLOAD = re.compile(r"\..+\.partial-(\d+)\Z")


class RefusedError(Exception):
    """Another command is at work; nothing was changed."""


def read_processes(roots: list[bytes]) -> list[tuple[int, bytes]]:
    """Return pid and arguments, variables and directory of the others that name the workspace."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        text = b""
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                text += (directory / name).read_bytes() + b"\0"
        with suppress(OSError):
            text += os.fsencode((directory / "cwd").readlink())
        if int(directory.name) != os.getpid() and any(root in text for root in roots):
            found.append((int(directory.name), text))
    return found


def measure(path: Path) -> tuple[int, str, float]:
    """Return bytes, a word that changes with any file of it, and when it was last written."""
    first = path.lstat()
    size, count, newest_ns = 0, 0, 0
    below = (Path(at) / name for at, some, files in os.walk(path) for name in (*some, *files))
    for one in (path, *below):
        with suppress(FileNotFoundError):
            facts = one.lstat()
            size += facts.st_size if stat.S_ISREG(facts.st_mode) else 0
            count += 1
            newest_ns = max(newest_ns, facts.st_mtime_ns)
    state = f"{first.st_dev}:{first.st_ino}:{count}:{size}:{newest_ns}"
    return size, state, newest_ns / 1e9


def children(directory: Path) -> list[Path]:
    """Return what lies in a directory, hidden names too, in order."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


class Plan:
    """One look at a workspace. held: the locks, as paths below it, that this process has taken."""

    def __init__(self, arguments: dict[str, Any], held: set[str]) -> None:
        given = Path(arguments["workspace"])
        self.root = given.resolve()
        self.arguments, self.held, self.now = arguments, held, time.time()
        self.items: list[dict[str, Any]] = []
        self.kept: dict[str, str] = {}
        self._roots = list({os.fsencode(given), os.fsencode(self.root)})
        self._processes = read_processes(self._roots)
        self._named: dict[str, str] = {}  # releases that something needs, and what

    def make(self) -> "Plan":
        """Look at everything."""
        self._trash()
        self._scratch()
        self._runs()
        self._releases()
        self._caches()
        self._uploads()
        return self

    def _add(
        self, path: Path, kind: str, why: str, lock: Path | None = None, rest: str = ""
    ) -> None:
        """Plan a path, unless a link leads to it. rest: of its state, what lies elsewhere."""
        if path.is_symlink() or path.parent.resolve() != path.parent:
            self._keep(path, "it is reached through a symbolic link")
            return
        with suppress(FileNotFoundError):
            size, state, _ = measure(path)
            item = {"path": self._name(path), "kind": kind, "num_bytes": size, "why": why}
            self.items.append(item | {"state": state + rest, "lock": lock and self._name(lock)})

    def _keep(self, path: Path, why: str) -> None:
        self.kept[self._name(path)] = why

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _user(self, path: Path) -> str:
        """Say which process names ``path`` in its arguments, variables or directory; "" if none."""
        for root in self._roots:
            whole = re.escape(root + b"/" + os.fsencode(self._name(path))) + rb"(?![\w-])"
            for pid, text in self._processes:
                if re.search(whole, text):
                    return f"process {pid} uses it"
        return ""

    def _locked(self, path: Path) -> bool:
        """Say whether another process holds a lock."""
        return self._name(path) not in self.held and is_locked(path)

    def _is_stale(self, path: Path) -> bool:
        """Say whether something half written was left alone for a day."""
        try:
            return self.now - measure(path)[2] > STALE_S
        except FileNotFoundError:
            return False

    def _trash(self) -> None:
        places = [self.root / name for name in ("releases", "runs", "cache", *STAGED)]
        for run in children(self.root / "runs"):
            places += [run, run / "checkpoints"]
        for place in places:
            for path in children(place):
                if TRASH.match(path.name):
                    self._add(path, "trash", "left by a gc that was interrupted")

    def _scratch(self) -> None:
        """Directories of warm-ups, checks and doctors; one in use names its release, too."""
        for command in STAGED:
            for path in children(self.root / command):
                if not path.is_dir() or TRASH.match(path.name):
                    continue
                lock = self.root / "cache" / path.name / f"{command}.lock"
                manifest = path / "manifest.json"
                staged = (manifest if manifest.exists() else path).lstat().st_mtime
                used = f"its {command} is at work" if self._locked(lock) else self._user(path)
                if not used and self.now - staged < RECENT_S:
                    used = "staged just now: a launch may follow"
                if used:
                    self._keep(path, used)
                    self._name_release(manifest, f"{self._name(path)} uses it")
                else:
                    self._add(path, "scratch", f"no {command} is at work in it", lock)

    def _name_release(self, manifest: Path, why: str) -> None:
        """Note the release of a manifest; one that cannot be read may name any of them."""
        if not manifest.exists() and not manifest.is_symlink():
            return
        try:
            self._named.setdefault(str(json.loads(manifest.read_bytes())["release"]), why)
        except (OSError, ValueError, KeyError, TypeError):
            self._named.setdefault("", f"{self._name(manifest)} is not readable and may name it")

    def _releases(self) -> None:
        found = children(self.root / "releases")
        whole = [p for p in found if re.fullmatch("[0-9a-f]+", p.name) and p.is_dir()]
        newest = max(whole, key=lambda path: path.stat().st_mtime, default=None)
        for path in whole:
            why = self._named.get(path.name) or self._named.get("") or self._user(path)
            if path.name == self.arguments["release"]:
                why = "this laptop deploys it"
            elif path == newest:
                why = why or "the newest release"
            if why:
                self._keep(path, why)
            else:
                self._add(path, "release", "no run, check, warm-up or process names it")
        for path in found:
            words = path.name.split("-")
            if words[0] == ".partial" and self._is_stale(path):
                pid, ticks = [*words[1:3], "", ""][:2]
                if not (pid.isdigit() and str(start_ticks(int(pid))) == ticks):
                    self._add(path, "staging", "left by a deploy that was interrupted")

    def _caches(self) -> None:
        """Plan the compile caches of releases that are gone, or that go now."""
        kept = {name.rpartition("/")[2] for name in self.kept if name.startswith("releases/")}
        kept |= {*self._named, self.arguments["release"]}
        for path in children(self.root / "cache"):
            found = CACHE.match(path.name)
            if found is None or not path.is_dir():
                continue
            locks = [path / f"{command}.lock" for command in STAGED]
            used = next((release for release in kept if release.startswith(found[1])), "")
            if used or "" in self._named:
                why = f"release {found[1]} stays"
            elif any(self._locked(lock) for lock in locks):
                why = "a warm-up or check is at work with it"
            elif self.now - measure(path)[2] < RECENT_S:
                why = "it was written just now"
            else:
                why = self._user(path)
            if why:
                self._keep(path, why)
            else:
                text = f"compiled for release {found[1]}, which no run names"
                self._add(path, "cache", text, locks[0])

    def _runs(self) -> None:
        for path in children(self.root / "runs"):
            if TRASH.match(path.name):
                continue
            self._name_release(path / "manifest.json", f"{self._name(path)} uses it")
            if path.name.startswith("."):
                if path.name.startswith(".starting-") and self._is_stale(path):
                    self._add(path, "staging", "left by a launch that was interrupted")
            elif path.is_dir():
                lock = path / "run.lock"
                used = "the run lives" if self._locked(lock) else self._user(path)
                if used:
                    self._keep(path, used)
                else:
                    self._ended_run(path, lock)

    def _ended_run(self, run: Path, lock: Path) -> None:
        checkpoints = children(run / "checkpoints")
        for path in checkpoints:
            if path.name.endswith(".partial") and STEP.match(path.name[: -len(".partial")]):
                self._add(path, "staging", "a checkpoint half written by a run that ended", lock)
        staging = [run / ".export.partial"]
        if (run / "export").exists():  # else a kill left the only export under this name
            staging.append(run / ".export.old")
        for path in staging:
            if path.exists() and self._is_stale(path):
                self._add(path, "staging", "left by an export that was interrupted", lock)
        keep = self.arguments["keep"]
        if keep is not None:
            self._old_checkpoints(run, [p for p in checkpoints if STEP.match(p.name)], keep)

    def _old_checkpoints(self, run: Path, found: list[Path], keep: int) -> None:
        """Plan what is beyond the newest ``keep`` complete ones; the best and damaged ones stay.

        A plan reads the digests of those that stay: what is damaged must not be all that is left.
        ``remove`` goes by sizes, and by the state of all: when one has changed, none goes.
        """
        try:
            best = best_step(run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._keep(run / "checkpoints", f"evaluations.json is not readable: {error}")
            return
        digests, num_kept = self.arguments["action"] == "plan", 0
        found.sort(key=step_of, reverse=True)
        states = "".join(f"{path.name}:{measure(path)[1]} " for path in found)
        rest = f" beside {hashlib.sha256(states.encode()).hexdigest()}"
        for path in found:
            if num_kept < keep:
                num_kept += is_complete(path, digests=digests)
            elif step_of(path) == best:
                self._keep(path, "the best of the run's evaluations")
            elif is_complete(path, digests=False):
                why = f"the run ended and has {num_kept} newer"
                self._add(path, "checkpoint", why, run / "run.lock", rest)

    def _uploads(self) -> None:
        """Partial files of pushes, anywhere in the workspace but in what has rules of its own."""
        for at, directories, files in os.walk(self.root):
            if Path(at) == self.root:
                directories[:] = [name for name in directories if name not in OWN]
            for name in files:
                path, upload, trash = Path(at) / name, UPLOAD.match(name), TRASH.match(name)
                if trash and UPLOAD.match(trash[1]):
                    self._add(path, "trash", "left by a gc that was interrupted")
                elif upload and self._is_stale(path) and start_ticks(int(upload[1])) is None:
                    self._add(path, "staging", "left by a push that was interrupted")


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's name."""
    return int(path.name.rpartition("_")[2])


def best_step(run: Path) -> int | None:
    """Return the step of the best evaluation; None when there is none."""
    try:
        best = json.loads((run / "evaluations.json").read_bytes())["best"]
    except FileNotFoundError:
        return None
    return None if best is None else int(best["step"])


def take(path: Path, wait_s: float, held_by: str) -> int:
    """Return the descriptor of a lock. Raises: RefusedError when it is held for too long."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    limit = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                os.close(handle)
                raise RefusedError(held_by) from None
            time.sleep(0.1)
        else:
            return handle


def hold(root: Path, planned: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Take the locks of the items that are free now; one that is not makes its items stay."""
    for name in sorted({item["lock"] for item in planned if item["lock"]}):
        if (root / name).is_file():
            with suppress(RefusedError):
                yield name, take(root / name, 0.0, name)


class Removal:
    """What became of the planned items."""

    def __init__(self, arguments: dict[str, Any], planned: list[dict[str, Any]]) -> None:
        self.arguments, self.planned = arguments, planned
        self.root = Path(arguments["workspace"]).resolve()
        self.left: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.removed: list[dict[str, Any]] = []
        self._moved: list[tuple[str, int, Path]] = []

    def set_aside(self) -> None:
        """Rename what may still go, under all locks. Raises: RefusedError."""
        runs = self.root / "runs"
        runs.mkdir(exist_ok=True)
        handles = [take(runs / ".launch.lock", LOCK_WAIT_S, "a launch holds the workspace")]
        try:
            held = dict(hold(self.root, self.planned))
            handles += held.values()
            plan = Plan(self.arguments, set(held)).make()
            again = {item["path"]: item["state"] for item in plan.items}
            for item in self.planned:
                name = item["path"]
                if again.get(name) == item["state"]:
                    self._move(item)
                else:
                    kept = [plan.kept[part] for part in parts(name) if part in plan.kept]
                    there = os.path.lexists(self.root / name)
                    changed = "it changed since the plan" if there else "it is gone"
                    self.left.append({"path": name, "why": [*kept, changed][0]})
        finally:
            for handle in handles:
                os.close(handle)

    def _move(self, item: dict[str, Any]) -> None:
        path = trash = self.root / item["path"]
        try:
            if item["kind"] != "trash":
                trash = path.with_name(f".trash-{os.getpid()}-{path.name}")
                path.rename(trash)
                sync(path.parent)
            self._moved.append((item["path"], item["num_bytes"], trash))
        except OSError as error:
            self.failed.append({"path": item["path"], "why": str(error)})

    def delete(self) -> None:
        """Delete what was renamed."""
        for name, size, trash in self._moved:
            try:
                if trash.is_dir():
                    shutil.rmtree(trash)
                else:
                    trash.unlink()
                self.removed.append({"path": name, "num_bytes": size})
            except OSError as error:
                self.failed.append({"path": name, "why": f"{trash.name} stays: {error}"})


def parts(name: str) -> list[str]:
    """Return a path and those above it: a/b/c, a/b, a."""
    words = name.split("/")
    return ["/".join(words[:count]) for count in range(len(words), 0, -1)]


def sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def remove(arguments: dict[str, Any], planned: list[dict[str, Any]]) -> dict[str, Any]:
    """Remove what was planned and may still go. Raises: RefusedError."""
    guard = take(Path(arguments["workspace"]), 0.0, "another gc is at work in the workspace")
    removal = Removal(arguments, planned)
    removal.set_aside()
    removal.delete()
    os.close(guard)
    return {"removed": removal.removed, "left": removal.left, "failed": removal.failed}


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Plan or remove."""
    root = Path(arguments["workspace"])
    if not root.is_dir():  # nothing was ever deployed
        names = ("items", "kept", "removed", "left", "failed")
        return {name: [] for name in names} | {"free_bytes": None}
    if arguments["action"] == "remove":
        answer = remove(arguments, json.loads(sys.stdin.read()))
    else:
        plan = Plan(arguments, set()).make()
        kept = [{"path": path, "why": why} for path, why in sorted(plan.kept.items())]
        answer = {"items": plan.items, "kept": kept}
    room = os.statvfs(root)
    return answer | {"free_bytes": room.f_bavail * room.f_frsize}


if __name__ == "__main__":
    try:
        answer = main(json.loads(sys.argv[1]))
    except RefusedError as refusal:
        hint = "type the same again when it has ended"
        told = {"kind": "refused", "code": "locked", "message": str(refusal), "hint": hint}
        answer = {"error": told}
    except OSError as problem:
        answer = {"error": {"kind": "failed", "message": f"cannot look or remove: {problem}"}}
    print(json.dumps(answer))
    sys.exit("error" in answer)
