"""The warm-up: it takes every shape of the plan, and its caches have one writer."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import assembly, cache_store, torch_compiler
from trainer.__main__ import main
from trainer.contract.compile_artifacts import framed
from trainer.contract.errors import ConfigError
from trainer.contract.manifest import Manifest

MakeRun = Callable[..., Path]
ROWS = {"packing": False, "row_lengths": [12, 32]}


def _lines(text: str, kind: str) -> list[dict[str, Any]]:
    return [told for told in map(json.loads, text.splitlines()) if told["kind"] == kind]


def _manifest(run_dir: Path) -> Manifest:
    return Manifest.from_json((run_dir / "manifest.json").read_text())


def test_every_declared_row_length_is_warmed_up(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(data={**ROWS, "token_budget": 64, "max_batch_size": 3})
    assert main(["warmup", "--run-dir", str(run_dir)]) == 0
    (told,) = _lines(capsys.readouterr().out, "warmup")
    assert told["shapes"] == [[3, 12, 4], [2, 32, 4]]  # rows, tokens, anchors
    assert told["loss"] > 0


def test_traces_are_kept_on_disk_only_by_a_torch_that_can(make_run: MakeRun) -> None:
    _, config = assembly.read_manifest(make_run(compile={"caching_precompile": True}))
    if torch_compiler.keeps_traces():
        assert assembly.gate_settings(config, 1).caching_precompile
    else:
        with pytest.raises(ConfigError, match=r"caching_precompile needs torch 2\.14, this is 2\."):
            assembly.gate_settings(config, 1)


def test_second_writer_of_a_cache_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    with (
        cache_store.only_writer(tmp_path),
        (tmp_path / cache_store.LOCK).open("rb") as elsewhere,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / cache_store.LOCK).open("rb") as elsewhere:
        fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_lock_of_whoever_started_the_warm_up_is_its_own(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer.cache_store import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('writes')\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with (tmp_path / cache_store.LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        took = subprocess.run(
            argv, capture_output=True, text=True, check=True, pass_fds=[lock.fileno()]
        )
        refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert took.stdout == "writes\n"
    assert refused.returncode == 1
    assert "another warm-up fills" in refused.stderr


def test_cache_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with (
            pytest.raises(ConfigError, match=f"cache directory .*{name}: (File exists|Not a dir)"),
            cache_store.only_writer(tmp_path / name),
        ):
            pass


def test_artefacts_that_torch_cannot_read_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    manifest, path = _manifest(make_run()), tmp_path / "caches.bin"
    path.write_bytes(framed(b"nothing that torch wrote", manifest))
    with pytest.raises(ConfigError, match="torch cannot read"):
        cache_store.load(path, manifest)


def test_saving_is_refused_before_a_warm_up_that_compiles_nothing(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "caches.bin"
    assert main(["warmup", "--run-dir", str(make_run()), "--save-artifacts", str(path)]) == 2
    told = capsys.readouterr()
    assert "nothing is compiled, so there is nothing to save; leave it out, or" in told.err
    assert told.out == ""  # nothing was loaded for it
    assert not path.exists()


def test_place_where_no_artefacts_can_be_saved_is_refused_before_the_warm_up(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    for path in (tmp_path, tmp_path / "nowhere" / "caches.bin"):
        assert main(["warmup", "--run-dir", str(run_dir), "--save-artifacts", str(path)]) == 2
        told = capsys.readouterr()
        assert told.err.startswith(f"error: {path}: no file can be written there")
        assert told.out == ""  # nothing was loaded for it


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"PK\x03\x04", "no file that warmup --save-artifacts has written")],
)
def test_what_is_no_artefact_file_is_an_error_of_one_line(
    make_run: MakeRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    says: str,
) -> None:
    path = tmp_path / "caches.bin"
    if content is not None:
        path.write_bytes(content)
    argv = ["warmup", "--run-dir", str(make_run()), "--load-artifacts", str(path)]
    assert main(argv) == 2
    assert says in capsys.readouterr().err.splitlines()[0]
