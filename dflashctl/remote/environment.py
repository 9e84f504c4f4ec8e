"""Makes a virtual environment from pinned requirements, once for each content.

argv[1]: {"workspace", "python", "pip_args", "index": digest of the bundle's requirements}; stdin:
the requirements text. The environment's key is over text, interpreter version and pip arguments;
READY.json in it is written last. ``envs/INDEX.json`` then says which python serves a release with
these requirements. Prints pip's output, then one JSON line.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HINT = (
    "read what stands above; `python` in hosts.yaml must name a Python with venv (apt install "
    "python3-venv), and pip without a network needs `pip_args` there, such as --find-links DIR"
)


class EnvironmentBuildError(Exception):
    """A step failed; the text says which and with what status."""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write by temporary name, fsync and rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def version_of(python: str) -> str:
    """Return implementation and version of an interpreter."""
    code = "import sys; print(sys.implementation.cache_tag, sys.version.split()[0])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentBuildError(f"{python} does not run: {error}") from error
    return done.stdout.strip()


def step(argv: list[str]) -> None:
    """Run one command with its output on our stdout."""
    sys.stdout.flush()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise EnvironmentBuildError(f"{' '.join(argv[:4])} ... ended with {done.returncode}")


def build(home: Path, python: str, text: str, pip_args: list[str]) -> None:
    """Make the environment in ``home``; what a kill left there is removed first."""
    if home.exists():
        shutil.rmtree(home)
    step([python, "-m", "venv", str(home)])
    requirements = home / "requirements.txt"
    requirements.write_text(text)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    step([*pip, "--no-input", *pip_args, "-r", str(requirements)])


def main(arguments: dict[str, Any], text: str) -> dict[str, Any]:
    """Build the environment unless it is there, and point the index at it."""
    envs = Path(arguments["workspace"]) / "envs"
    envs.mkdir(parents=True, exist_ok=True)
    version = version_of(arguments["python"])
    recipe = json.dumps([text, version, arguments["pip_args"]])
    key = hashlib.sha256(recipe.encode()).hexdigest()
    home = envs / key
    with (envs / f".{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second deploy waits, then finds it ready
        built = not (home / "READY.json").exists()
        if built:
            build(home, arguments["python"], text, arguments["pip_args"])
            write_json(home / "READY.json", {"version": version})
        python = str(home / "bin" / "python")
        write_json(envs / f"{arguments['index']}.json", {"python": python, "key": key})
    return {"key": key, "python": python, "built": built, "version": version}


if __name__ == "__main__":
    try:
        answer = main(json.loads(sys.argv[1]), sys.stdin.read())
    except (EnvironmentBuildError, OSError) as problem:
        text = f"the environment could not be made: {problem}"
        error = {"kind": "failed", "message": text, "code": "environment", "hint": HINT}
        answer = {"error": error}
    print(json.dumps(answer))
    sys.exit("error" in answer)
