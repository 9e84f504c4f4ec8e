"""Learns what a launch pins and what stands against it, without changing anything.

argv[1]: {"workspace", "tag", "release", "files": {path: sha256}, "python", "requirements_digest",
"packages", "optional_packages", "target", "revision", "data", "max_length", "prompts", "log_dir",
"env"}. Prints one JSON object; a fact that could not be learnt is an entry of ``problems`` ([code,
text, hint]).
"""

import hashlib
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflashctl.remote.checkpoints import is_complete
from dflashctl.remote.interpreter import chosen_python
from dflashctl.remote.liveness import is_locked

CHUNK_BYTES = 1 << 20
STAMP_CHARS = 1 << 16
MAX_STAMPS = 32
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
# What pip installed is named by its directory. importlib.metadata, which knows other ways too, is
# slower to import than all else here; it is asked only about what has to be there.
VERSIONS = """
import json, os, sys
found, wanted, optional = {}, *map(json.loads, sys.argv[1:])
for path in reversed(sys.path):
    for entry in os.listdir(path) if os.path.isdir(path) else ():
        name, _, version = entry.removesuffix(".dist-info").partition("-")
        if entry.endswith(".dist-info") and name in (*wanted, *optional):
            found[name] = version
for name in set(wanted) - set(found):
    import importlib.metadata as m
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps({"version": sys.version.split()[0], "python": sys.executable, "found": found}))
"""


class Facts:
    """Collects facts and problems for one answer."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.workspace = Path(arguments["workspace"])
        self.problems: list[list[str]] = []
        self.answer: dict[str, Any] = {}
        self.versions: subprocess.Popen[str] | None = None
        self.listing: subprocess.Popen[str] | None = None
        self.no_python = ""

    def problem(self, code: str, text: str, hint: str = "") -> None:
        """Note what stands against the launch."""
        self.problems.append([code, text, hint])

    def release(self) -> None:
        """Check every byte of the release: by the list of its files, else by its own name."""
        release = self.workspace / "releases" / self.arguments["release"]
        if not release.is_dir():
            text = f"release {release.name[:12]} is not in the container"
            self.problem("release-missing", text, "dflashctl deploy")
            return
        if not self.arguments["files"] and release_digest(release) != release.name:
            text = f"release {release.name[:12]} holds other bytes than at its launch"
            hint = "check out the commit of the launch, then: dflashctl deploy; or launch a new tag"
            self.problem("release-damaged", text, hint)
        for name, sha256 in self.arguments["files"].items():
            path = release / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                text = f"release {release.name[:12]}: {name} is not what was deployed"
                self.problem("release-damaged", text, "dflashctl deploy")
                return

    def begin(self) -> None:
        """Start the two programs that take longest; what they say is read in its turn."""
        chosen = chosen_python(self.arguments)
        names = [json.dumps(self.arguments[of]) for of in ("packages", "optional_packages")]
        try:
            self.versions = start([chosen, "-I", "-c", VERSIONS, *names])
        except OSError as error:
            self.no_python = str(error)
        if shutil.which("nvidia-smi"):
            self.listing = start(["timeout", "-k", "2", "10", "nvidia-smi", "-L"])

    def python(self) -> None:
        """Learn the versions of what the interpreter has installed."""
        chosen = chosen_python(self.arguments)
        hint = "dflashctl deploy --env   (or set `python:` in hosts.yaml)"
        if self.versions is None:
            self.problem("python", f"{chosen} does not run: {self.no_python}", hint)
            return
        try:
            out, err = self.versions.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.versions.kill()
            self.problem("python", f"{chosen} does not run: no answer within 60 s", hint)
            return
        if self.versions.returncode:
            said = " ".join(err.split())[-300:] or f"exit status {self.versions.returncode}"
            self.problem("python", f"{chosen} does not run: {said}", hint)
            return
        found = json.loads(out)
        missing = [n for n in self.arguments["packages"] if n not in found["found"]]
        if missing:
            self.problem("packages", f"{chosen} lacks {', '.join(missing)}", hint)
        self.answer["python"] = found["python"]
        self.answer["packages"] = {"python": found["version"], **found["found"]}

    def target(self) -> None:
        """Pin the target: a digest of a local directory, or the commit of a hub revision."""
        name = self.arguments["target"]
        directory = Path(name)
        if directory.is_absolute():
            self.answer["target_revision"] = self.local_target(directory)
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            self.answer["target_revision"] = self.hub_target(name)
        else:
            text = f"target.path {name!r} is neither an absolute directory nor a hub id"
            self.problem("target-missing", text)

    def local_target(self, directory: Path) -> str | None:
        """Return a digest over config.json and the weight files' names and sizes."""
        hint = f"dflashctl push LOCAL {directory.parent}"
        if not directory.is_dir():
            text = f"target.path {directory} is not in the container"
            self.problem("target-missing", text, hint)
            return None
        faults = self.model_faults(directory)
        for text, fix in faults:
            self.problem("target-damaged", f"target.path {directory}: {text}", f"{fix}; {hint}")
        if faults:
            return None
        config = directory / "config.json"
        weights = sorted({p for pattern in WEIGHTS for p in directory.glob(pattern)})
        if not (config.is_file() and weights):
            text = f"target.path {directory} holds no config.json or no weights"
            self.problem("target-missing", text, hint)
            return None
        digest = hashlib.sha256(config.read_bytes())
        for path in weights:
            digest.update(f"{path.name}\0{path.stat().st_size}\n".encode())
        return f"sha256:{digest.hexdigest()}"

    def model_faults(self, directory: Path) -> list[tuple[str, str]]:
        """Return what the release's own look at a model directory finds: (text, next step)."""
        release = self.workspace / "releases" / self.arguments["release"]
        path = release / "trainer" / "contract" / "model_directory.py"
        damaged = any(code.startswith("release-") for code, _, _ in self.problems)
        if damaged or not path.is_file():  # a run may be resumed with an older release
            return []
        return list(runpy.run_path(str(path))["faults"](directory))

    def hub_target(self, name: str) -> str | None:
        """Return the commit that the hub cache of the container holds for the revision."""
        revision = self.arguments["revision"] or "main"
        environment = os.environ | self.arguments["env"]
        home = environment.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
        cache = Path(environment.get("HF_HUB_CACHE", f"{home}/hub"))
        held = cache / f"models--{name.replace('/', '--')}"
        ref = held / "refs" / revision
        if re.fullmatch(r"[0-9a-f]{40}", revision):
            commit = str(revision)
        elif ref.is_file():
            commit = ref.read_text().strip()
        else:
            text = f"{name}: the commit of revision {revision!r} is not known in the container"
            self.problem("target-revision", text, "set target.revision to a commit (40 hex digits)")
            return None
        if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            snapshot = held / "snapshots" / commit  # what is missing cannot be fetched then
            for text, fix in self.model_faults(snapshot):
                hint = f"{fix}; or unset HF_HUB_OFFLINE in env: of hosts.yaml"
                self.problem("target-damaged", f"target.path {name} ({snapshot}): {text}", hint)
        return commit

    def dataset(self) -> None:
        """Pin the data set by its digest."""
        path = Path(self.arguments["data"])
        if path.is_dir():
            self.prepared(path)
            return
        if not path.is_file():
            hint = f"dflashctl push FILE {path.parent}"
            self.problem("data-missing", f"data.path {path} is not in the container", hint)
            return
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        self.answer["dataset_sha256"] = digest.hexdigest()

    def prepared(self, directory: Path) -> None:
        """Pin a directory of `trainer prepare` by the digest in its dataset.json.

        That digest covers those of all shards. Here their sizes are compared, which costs nothing;
        the trainer reads every byte of them at its start.
        """
        listing = directory / "dataset.json"
        if not listing.is_file():
            text = f"data.path {directory} is a directory without dataset.json"
            hint = "make it with: python -m trainer prepare   (once killed, give the command again)"
            self.problem("data-missing", text, hint)
            return
        hint = f"dflashctl push {directory.name} {directory.parent}   (or prepare it again)"
        try:
            document = json.loads(listing.read_text())
            wrong = damage(directory, document)
            prepared = document["content"]["options"]["max_length"]
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"dataset.json is none of `trainer prepare` ({error!r})"
        if wrong:
            self.problem("data-damaged", f"data.path {directory}: {wrong}", hint)
            return
        wanted = self.arguments.get("max_length")
        if wanted is not None and wanted != prepared:
            text = f"data.max_length is {wanted}, but {directory} was prepared with {prepared}"
            self.problem("data-max-length", text, f"--set data.max_length={prepared}")
        self.answer["dataset_sha256"] = document["sha256"]

    def prompts(self) -> None:
        """Look for the held-out prompts that the run is to decode."""
        for name, file in self.arguments.get("prompts", {}).items():
            if not Path(file).is_file():
                text = f"evaluation.prompts.{name} {file} is not in the container"
                self.problem("prompts-missing", text, f"dflashctl push FILE {Path(file).parent}")

    def run(self) -> None:
        """Look for an earlier run of the tag, in whatever state."""
        directory = self.workspace / "runs" / self.arguments["tag"]
        if directory.exists():
            self.answer["run"] = run_state(directory)
        log_dir = self.arguments["log_dir"]
        log = Path(log_dir) / f"train_stdout_{directory.name}.log" if log_dir else None
        if log is not None and log.exists() and "run" not in self.answer:
            self.problem("tag-exists", f"the log of an earlier run is there: {log}")

    def gpus(self) -> None:
        """List the GPUs that the container itself can see; absent when it has no nvidia-smi."""
        if self.listing is None:
            return
        out, err = self.listing.communicate()
        self.answer["gpu_uuids"] = re.findall(r"UUID: (GPU-[0-9a-f-]+)", out)
        self.answer["gpu_silent"] = self.listing.returncode in (124, 137)  # as timeout tells it
        if self.listing.returncode != 0:
            self.answer["gpu_problem"] = (out + err).strip()[:500]

    def driver(self) -> None:
        """Learn the version of the NVIDIA kernel module; absent where there is none."""
        try:
            text = Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            return
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
        self.answer["driver"] = found[1] if found else None

    def warmups(self) -> None:
        """Read the stamps of warm-ups, oldest first, each with the name of its cache."""
        found = []
        for path in self.workspace.glob("cache/*/warmup.json"):
            try:
                with path.open() as stream:
                    stamp = json.loads(stream.read(STAMP_CHARS))
                found.append((path.stat().st_mtime, path.parent.name, dict(stamp)))
            except (OSError, ValueError, TypeError):
                continue  # a stamp that cannot be read vouches for nothing
        newest = sorted(found, key=lambda entry: entry[:2])[-MAX_STAMPS:]
        self.answer["warmups"] = [stamp | {"key": key} for _, key, stamp in newest]

    def room(self) -> None:
        """Measure what a run needs besides its inputs; the laptop judges it."""
        places = {"workspace": self.workspace, "log_dir": self.arguments["log_dir"]}
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shm = Path("/dev/shm")  # noqa: S108 - looked at, not written
        self.answer["room"] = {
            "disks": {name: disk(Path(path)) for name, path in places.items() if path},
            "shm_bytes": disk(shm)["total_bytes"] if shm.is_mount() else None,
            "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
            "tmux": shutil.which("tmux") is not None,
            "target": sizes(Path(self.arguments["target"])),
        }


def start(argv: list[str]) -> "subprocess.Popen[str]":
    """Start a program whose words are read later."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def disk(path: Path) -> dict[str, Any]:
    """Return bytes and inodes where ``path`` lies or would lie."""
    there = path.absolute()
    while not os.path.exists(there):  # noqa: PTH110 - Path.exists raises where it may not look
        there = there.parent
    room = os.statvfs(there)
    return {
        "path": str(path),
        "free_bytes": room.f_bavail * room.f_frsize,
        "total_bytes": room.f_blocks * room.f_frsize,
        "inodes": room.f_files,  # 0: the file system counts none
        "free_inodes": room.f_favail,
    }


def sizes(directory: Path) -> dict[str, int]:
    """Return those sizes of the target that the draft shares, as far as config.json tells them."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    try:
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config") or config
        found = {name: config.get(name) for name in (*names, "head_dim")}
    except (OSError, ValueError, AttributeError):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def damage(directory: Path, document: dict[str, Any]) -> str | None:
    """Say what in a prepared directory differs from its dataset.json, by its digest and sizes."""
    content = document["content"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))  # as the trainer digests it
    if hashlib.sha256(text.encode()).hexdigest() != document["sha256"]:
        return "dataset.json was changed after it was written"
    for shard in content["shards"]:
        for part, fact in shard["files"].items():
            path = directory / f"{shard['name']}.{part}.bin"
            if not path.is_file() or path.stat().st_size != fact["size_bytes"]:
                return f"{path.name} is not whole"
    return None


def release_digest(release: Path) -> str:
    """Return the digest that names a release: over the sorted (path, mode, sha256) of its files."""
    lines = []
    for path in sorted(p for p in release.rglob("*") if p.is_file()):
        if "__pycache__" not in path.parts:
            data = path.read_bytes()
            mode = "755" if data.startswith(b"#!") else "644"  # as the bundle gives it
            name = path.relative_to(release).as_posix()
            lines.append((name, mode, hashlib.sha256(data).hexdigest()))
    listing = "".join("\0".join(line) + "\n" for line in sorted(lines))
    return hashlib.sha256(listing.encode()).hexdigest()


def holds_work(directory: Path) -> bool:
    """Say whether a run directory holds what a trainer wrote, whatever its records say."""
    files = [*directory.glob("train_stdout_*.log"), directory / "metrics.jsonl"]
    written = any(path.exists() and path.stat().st_size for path in files)
    return written or (directory / "checkpoints").exists()


def run_state(directory: Path) -> dict[str, Any]:
    """Say what a run directory is: running, ended, started (lost) or never started."""
    try:
        manifest = dict(json.loads((directory / "manifest.json").read_text()))
    except (OSError, ValueError, TypeError):
        manifest = {}
    state = "started without a record" if holds_work(directory) else "never-started"
    if (directory / "exit.json").exists():
        state = "ended"
    elif (directory / "process.json").exists():
        state = "lost"
    if is_locked(directory / "run.lock"):
        state = "running"
    facts = {"state": state, "run_id": manifest.get("run_id"), "manifest": manifest}
    return facts | {"finished_step": finished_step(directory) if state == "ended" else None}


def finished_step(directory: Path) -> int | None:
    """Return the last step of a run that has finished and has its checkpoint, None of others."""
    try:
        record = json.loads((directory / "exit.json").read_text())
        step = int(record["last_step"]) if record["state"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if step is None:
        return None
    path = directory / "checkpoints" / f"step_{step:08d}"
    return step if is_complete(path, digests=False) else None


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Collect everything; one question that fails does not hide the answers of the others."""
    facts = Facts(arguments)
    looks = (facts.begin, facts.release, facts.python, facts.target, facts.dataset, facts.prompts)
    for ask in (*looks, facts.run, facts.gpus, facts.driver, facts.warmups, facts.room):
        try:
            ask()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            facts.problem("facts", f"{ask.__name__}: {error}")
    facts.answer["clock_unix_s"] = time.time()
    facts.answer["problems"] = facts.problems
    return facts.answer


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
