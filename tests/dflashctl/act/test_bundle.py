"""The bundle: same files, same digest; anything else, another digest."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from dflashctl.bundle import build_bundle
from dflashctl.errors import DflashctlError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "tree" / "trainer"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "data" / "__init__.py").write_text("x = 1\n")
    (root / "requirements.txt").write_text("torch==2.13.0\n")
    return root


def test_digest_is_over_paths_modes_and_content(package: Path) -> None:
    empty, x1 = hashlib.sha256(b"").hexdigest(), hashlib.sha256(b"x = 1\n").hexdigest()
    wants = hashlib.sha256(b"torch==2.13.0\n").hexdigest()
    listing = (
        f"trainer/__init__.py\x00644\x00{empty}\n"
        f"trainer/data/__init__.py\x00644\x00{x1}\n"
        f"trainer/requirements.txt\x00644\x00{wants}\n"
    )
    assert build_bundle(package).digest == hashlib.sha256(listing.encode()).hexdigest()


def test_times_umask_caches_and_place_do_not_change_the_bytes(
    package: Path, tmp_path: Path
) -> None:
    first = build_bundle(package)
    other = tmp_path / "elsewhere" / "trainer"
    shutil.copytree(package, other)
    (other / "__pycache__").mkdir()
    (other / "__pycache__" / "x.py").write_text("cache")
    (other / "notes.md").write_text("no code")
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    second = build_bundle(other)
    assert second.digest == first.digest
    assert second.tar_bytes() == first.tar_bytes()


def test_one_changed_byte_and_one_renamed_file_change_the_digest(package: Path) -> None:
    first = build_bundle(package).digest
    (package / "data" / "__init__.py").write_text("x = 2\n")
    second = build_bundle(package).digest
    (package / "data" / "__init__.py").write_text("x = 1\n")
    (package / "data").rename(package / "date")
    third = build_bundle(package).digest
    assert len({first, second, third}) == 3


def test_the_tar_holds_exactly_the_listed_files_with_time_and_owner_zero(package: Path) -> None:
    bundle = build_bundle(package)
    with tarfile.open(fileobj=io.BytesIO(bundle.tar_bytes())) as archive:
        members = archive.getmembers()
        content = {m.name: archive.extractfile(m) for m in members}
        digests = {n: hashlib.sha256(f.read()).hexdigest() for n, f in content.items() if f}
    assert [m.name for m in members] == [f.path for f in bundle.files]
    assert digests == {f.path: f.sha256 for f in bundle.files}
    assert {(m.mtime, m.uid, m.gid, m.mode) for m in members} == {(0, 0, 0, 0o644)}


def test_a_package_without_requirements_is_refused(package: Path) -> None:
    (package / "requirements.txt").unlink()
    with pytest.raises(DflashctlError, match=r"no requirements\.txt"):
        build_bundle(package)


def test_the_installed_trainer_is_found_and_carries_its_pins() -> None:
    bundle = build_bundle()
    paths = {f.path for f in bundle.files}
    assert {"trainer/runner.py", "trainer/contract/layout.py"} <= paths
    assert "torch==" in bundle.requirements
    assert all("__pycache__" not in path for path in paths)


def test_git_commit_and_dirty_flag_are_those_of_the_package_alone(package: Path) -> None:
    tree = package.parent
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert (build_bundle(package).git_commit, build_bundle(package).git_dirty) == (None, None)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (tree / "other.txt").write_text("outside the package")
    clean = build_bundle(package)
    assert (clean.git_commit, clean.git_dirty) == (head.stdout.strip(), False)
    (package / "__init__.py").write_text("changed = True\n")
    assert build_bundle(package).git_dirty is True
