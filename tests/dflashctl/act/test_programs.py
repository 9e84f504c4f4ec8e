"""The receiving programs as processes, fed with archives made by hand."""

import ast
import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl import remote
from dflashctl.remote import releases
from dflashctl.remote.file_locks import take_within
from dflashctl.remote.interpreter import chosen_python
from tests.dflashctl.act.conftest import names, wait_until


def run(name: str, arguments: dict[str, Any], stdin: bytes) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", "-c", remote.program(name), json.dumps(arguments)]
    done = subprocess.run(argv, input=stdin, capture_output=True, check=False, timeout=100)
    assert done.stderr == b"", done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tar(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            member.size = len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def order(workspace: Path, **files: bytes) -> dict[str, Any]:
    listed = {name: [0o644, sha(data)] for name, data in files.items()}
    return {"workspace": str(workspace), "digest": "ab12", "files": listed}


def test_a_whole_archive_becomes_the_release(tmp_path: Path) -> None:
    rc, answer = run("unpack", order(tmp_path, a=b"1", b=b"2"), tar(("a", b"1"), ("b", b"2")))
    assert (rc, answer) == (0, {"written": 2, "removed_partials": 0})
    assert names(tmp_path / "releases") == ["ab12"]
    assert (tmp_path / "releases/ab12/b").read_bytes() == b"2"


HOSTILE = {
    "truncated": tar(("a", b"x" * 4000))[:2000],
    "empty": b"",
    "no tar": b"hello" * 300,
    "missing file": tar(),
    "absolute name": tar(("/tmp/evil", b"1")),
    "parent name": tar(("../evil", b"1")),
    "unlisted": tar(("a", b"1"), ("c", b"1")),
    "twice": tar(("a", b"1"), ("a", b"1")),
    "other bytes": tar(("a", b"2")),
    "symlink": tar(("a", b""), kind=tarfile.SYMTYPE),
    "hard link": tar(("a", b""), kind=tarfile.LNKTYPE),
    "device": tar(("a", b""), kind=tarfile.CHRTYPE),
}


@pytest.mark.parametrize("archive", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_archive_leaves_nothing_of_a_release(tmp_path: Path, archive: bytes) -> None:
    wanted = b"x" * 4000 if archive == HOSTILE["truncated"] else b"1"
    rc, answer = run("unpack", order(tmp_path, a=wanted), archive)
    assert rc == 1
    assert answer["error"]["kind"] == "mismatch"
    assert names(tmp_path / "releases") == []
    assert not (tmp_path / "evil").exists()


def test_partials_of_dead_deploys_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    releases = tmp_path / "releases"
    own = Path(f"/proc/{os.getpid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
    living, recycled = f".partial-{os.getpid()}-{own}", f".partial-{os.getpid()}-1"
    for name in (living, recycled, ".partial-999999999-5", ".partial-x"):
        (releases / name).mkdir(parents=True)
        (releases / name / "half").write_text("x")
    rc, answer = run("unpack", order(tmp_path, a=b"1"), tar(("a", b"1")))
    assert (rc, answer["removed_partials"]) == (0, 3)
    assert names(releases) == [living, "ab12"]


def test_a_killed_unpack_leaves_only_a_partial_and_the_next_one_completes(tmp_path: Path) -> None:
    arguments, whole = order(tmp_path, a=b"1", b=b"y" * 5000), tar(("a", b"1"), ("b", b"y" * 5000))
    argv = [sys.executable, "-I", "-S", "-c", remote.program("unpack"), json.dumps(arguments)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(whole[:3000])
    process.stdin.flush()
    limit = time.monotonic() + 60
    while not list(tmp_path.glob("releases/.partial-*")):
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdin.close()
    assert not (tmp_path / "releases/ab12").exists()
    rc, answer = run("unpack", arguments, whole)
    assert (rc, answer) == (0, {"written": 2, "removed_partials": 1})


def test_of_two_deploys_at_once_the_first_to_end_is_not_replaced(tmp_path: Path) -> None:
    arguments, whole = order(tmp_path, a=b"1", b=b"y" * 5000), tar(("a", b"1"), ("b", b"y" * 5000))
    argv = [sys.executable, "-I", "-S", "-c", remote.program("unpack"), json.dumps(arguments)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as slow:
        assert slow.stdin is not None
        slow.stdin.write(whole[:3000])
        slow.stdin.flush()
        wait_until(lambda: any(tmp_path.glob("releases/.partial-*")))
        assert run("unpack", arguments, whole) == (0, {"written": 2, "removed_partials": 0})
        first = (tmp_path / "releases/ab12").stat()  # a run may have begun with it
        answer, _ = slow.communicate(whole[3000:])
    assert json.loads(answer) == {"written": 2, "removed_partials": 0}
    assert os.path.samestat((tmp_path / "releases/ab12").stat(), first)
    assert names(tmp_path / "releases") == ["ab12"]


def test_a_damaged_release_is_named_and_replaced(tmp_path: Path) -> None:
    arguments, whole = order(tmp_path, a=b"1", b=b"2"), tar(("a", b"1"), ("b", b"2"))
    run("unpack", arguments, whole)
    release = tmp_path / "releases/ab12"
    (release / "a").write_bytes(b"?")
    (release / "new").write_bytes(b"")
    (release / "__pycache__").mkdir()
    (release / "__pycache__/a.pyc").write_bytes(b"bytecode")
    question = arguments | {"files": {"a": sha(b"1"), "b": sha(b"2")}}
    rc, answer = run("releases", question, b"")
    assert (rc, answer["state"], answer["differing"]) == (0, "damaged", ["a", "new"])
    run("unpack", arguments, whole)
    rc, answer = run("releases", question, b"")
    assert (answer["state"], answer["differing"]) == ("present", [])
    assert names(tmp_path / "releases") == ["ab12"]


def test_a_release_that_a_gc_removes_under_the_look_is_absent(tmp_path: Path) -> None:
    release, trash = tmp_path / "releases/ab12", tmp_path / "releases/.trash-1-ab12"
    for number in range(20):
        (release / f"d{number}").mkdir(parents=True)
        (release / f"d{number}/a").write_bytes(b"1")
    wanted = {f"d{number}/a": sha(b"1") for number in range(20)}
    asked = {"workspace": str(tmp_path), "digest": "ab12", "files": wanted}
    ended = threading.Event()

    def remove_and_bring_back() -> None:
        while not ended.is_set():
            release.rename(trash)
            trash.rename(release)

    thread = threading.Thread(target=remove_and_bring_back)
    thread.start()
    try:
        states = {releases.main(asked)["state"] for _ in range(200)}
    finally:
        ended.set()
        thread.join()
    assert states <= {"present", "absent", "damaged"}
    assert releases.main(asked)["state"] == "present"


def entries(**files: bytes) -> list[list[Any]]:
    return [[name, 0o644, sha(data), len(data)] for name, data in files.items()]


def test_receive_compares_by_content_and_writes_only_what_was_sent(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"1")
    (tmp_path / "other").write_bytes(b"2")
    listing = entries(same=b"1", other=b"3", absent=b"4")
    compare = {"directory": str(tmp_path), "action": "compare"}
    rc, answer = run("receive", compare, json.dumps(listing).encode() + b"\n")
    assert (rc, answer) == (0, {"wanted": ["other", "absent"]})
    (tmp_path / ".other.partial-999999999").write_bytes(b"a kill left this")
    sent = json.dumps(listing[1:]).encode() + b"\n" + tar(("other", b"3"), ("absent", b"4"))
    rc, answer = run("receive", compare | {"action": "receive"}, sent)
    assert (rc, answer) == (0, {"written": 2})
    assert names(tmp_path) == ["absent", "other", "same"]
    assert (tmp_path / "other").read_bytes() == b"3"


def test_receive_keeps_the_old_file_when_the_new_one_is_not_what_was_listed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"old")
    order_ = {"directory": str(tmp_path), "action": "receive"}
    sent = json.dumps(entries(data=b"new")).encode() + b"\n" + tar(("data", b"bad"))
    rc, answer = run("receive", order_, sent)
    assert (rc, answer["error"]["kind"]) == (1, "mismatch")
    assert names(tmp_path) == ["data"]
    assert (tmp_path / "data").read_bytes() == b"old"


def imports(path: Path) -> list[str]:
    """Return the modules that a file imports; ``import a.b`` is told as it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [f"import {name.name}" for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(f"from {node.module}")
    return found


@pytest.mark.parametrize(
    "path", sorted(Path(remote.__file__).parent.glob("[a-z]*.py")), ids=lambda path: path.stem
)
def test_a_program_imports_what_every_python_has_and_what_comes_with_it(path: Path) -> None:
    text = remote.program(path.stem)
    for line in imports(path):
        way, module = line.split()
        ours = way == "from" and module.startswith("dflashctl.remote.")
        assert ours or module.partition(".")[0] in sys.stdlib_module_names, line
        assert not ours or f"_provide('{module}', " in text


def test_a_held_lock_is_waited_for_until_it_is_free_or_a_limit(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as holder, lock.open("w") as other:
        assert take_within(holder.fileno(), 0.0)
        assert not take_within(other.fileno(), 0.0)
        threading.Timer(0.2, lambda: fcntl.flock(holder, fcntl.LOCK_UN)).start()
        assert take_within(other.fileno(), 100.0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_index_of_environments_leaves_the_interpreter_of_the_inventory(
    tmp_path: Path, content: bytes
) -> None:
    arguments = {"workspace": str(tmp_path), "requirements_digest": "ab", "python": "/usr/bin/py"}
    index = tmp_path / "envs/ab.json"
    index.parent.mkdir()
    index.write_bytes(b'{"python": "/envs/ab/bin/python"}')
    assert chosen_python(arguments) == "/envs/ab/bin/python"
    index.write_bytes(content)
    assert chosen_python(arguments) == "/usr/bin/py"
