"""`dflashctl pull` from a container that answers with an archive made to do harm."""

import hashlib
import json
import tarfile
from typing import Any

import pytest

from dflashctl.received import MANIFEST
from tests.dflashctl.act.conftest import Project

EARLIER = b"what an earlier pull brought\n"
# Found on the PATH before the real one, it answers for collect.py.
PYTHON = "#!/bin/sh\ncat > /dev/null\nexec cat {archive}\n"


def member(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """Return header and content of a member; ``fields`` go over those of a regular file."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    return info.tobuf(tarfile.GNU_FORMAT) + content + padding


def pax(*records: str) -> bytes:
    """Return a pax header; the length of a record, two digits, counts itself."""
    text = "".join(f"{len(record) + 4} {record}\n" for record in records)
    return member("pax", text.encode(), type=tarfile.XHDTYPE)


def manifest(**contents: bytes) -> bytes:
    """Return the last member: it swears to these files."""
    files = {
        name: {"size_bytes": len(c), "sha256": hashlib.sha256(c).hexdigest(), "sent": True}
        for name, c in contents.items()
    }
    return member(MANIFEST, json.dumps({"v": 1, "files": files}).encode())


class Hostile:
    """A project whose container's python3 is a program that writes an archive."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.run_dir = project.root / "runs" / "x"
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "metrics.jsonl").write_bytes(EARLIER)
        (project.root / "precious").write_bytes(b"precious")
        self.archive = project.root / "archive"
        (project.root / "bin").mkdir()
        python = project.root / "bin" / "python3"
        python.write_text(PYTHON.format(archive=self.archive))
        python.chmod(0o755)
        project.environment["PATH"] = f"{project.root}/bin:/usr/bin:/bin"

    def files(self) -> dict[str, bytes]:
        """Return every file, link and directory of the project but for what is in staging."""
        found = (path for path in self.project.root.rglob("*") if ".pull" not in path.parts)
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(found)}

    def pull(self, archive: bytes) -> dict[str, Any]:
        """Pull it; whatever happens, every file is afterwards as it was."""
        self.archive.write_bytes(archive + bytes(2 * tarfile.BLOCKSIZE))
        before = self.files()
        document = self.project.document("pull", "x")
        assert self.files() == before
        return document


@pytest.fixture
def hostile(project: Project) -> Hostile:
    return Hostile(project)


GOOD = member("metrics.jsonl", b"new\n")


@pytest.mark.parametrize(
    ("archive", "named"),
    [
        (member("../../../precious", b"x"), "../../../precious"),
        (member("export/../../../precious", b"x"), "export/../../../precious"),
        (member("/precious-root", b"x"), "/precious-root"),
        (member("environment.json", b"x"), "environment.json"),
        (
            member("export", type=tarfile.SYMTYPE, linkname="../../..") + member("export/x", b"x"),
            "export",
        ),
        (member("export/x", type=tarfile.LNKTYPE, linkname="../../precious"), "export/x"),
        (member("export/x", type=tarfile.BLKTYPE, devmajor=8), "export/x"),
        (member("export/x", type=tarfile.FIFOTYPE), "export/x"),
        (member("export/x", type=tarfile.DIRTYPE), "export/x"),
        (member("metrics.jsonl", b"once more\n"), "metrics.jsonl"),
        (member("export/x", type=tarfile.GNUTYPE_SPARSE, size=1 << 50), "export/x"),
        (member("pax", type=tarfile.XHDTYPE, size=1 << 50), "pax"),
        (member("export/x", size=-512), "export/x"),
        (
            pax("GNU.sparse.major=1", "GNU.sparse.minor=0") + member("export/x", b"9\n"),
            "not a regular file",
        ),
        (manifest() + member("export/x", b"x"), "export/x"),
    ],
    ids=[
        *(
            "parent",
            "inner-parent",
            "absolute",
            "secret",
            "symlink",
            "hard-link",
            "device",
            "fifo",
            "directory",
        ),
        *("twice", "sparse", "huge-header", "negative-size", "pax-sparse", "after-manifest"),
    ],
)
def test_hostile_member_is_named_and_nothing_is_written(
    hostile: Hostile, archive: bytes, named: str
) -> None:
    refused = hostile.pull(GOOD + archive)
    assert (refused["rc"], refused["error"]["code"]) == (7, "hostile-archive"), refused
    assert named in refused["error"]["message"]
    assert not (hostile.run_dir / ".pull").exists()


def test_declared_size_beyond_the_limit_is_refused_before_it_is_received(hostile: Hostile) -> None:
    refused = hostile.pull(GOOD + member("export/x", size=1 << 50))
    assert (refused["rc"], refused["error"]["code"]) == (3, "too-large")
    assert "export/x" in refused["error"]["message"]


def test_declared_size_that_does_not_come_is_a_damaged_archive(hostile: Hostile) -> None:
    refused = hostile.pull(GOOD + member("export/x", size=1 << 30))
    assert (refused["rc"], refused["error"]["code"]) == (7, "bad-archive")


def test_content_that_is_not_what_the_manifest_says_leaves_the_earlier_file(
    hostile: Hostile,
) -> None:
    refused = hostile.pull(GOOD + manifest(**{"metrics.jsonl": b"other\n"}))
    assert refused["rc"] == 7
    assert "metrics.jsonl: sha256" in refused["error"]["message"]


@pytest.mark.parametrize(
    "archive",
    [b"\x1b]0;owned\x07" * 1000, pax("comment=xxxxxx") * 2000, pax("GNU.sparse.size=x") + GOOD],
    ids=["noise", "headers-upon-headers", "no-number"],
)
def test_what_is_no_archive_is_refused(hostile: Hostile, archive: bytes) -> None:
    refused = hostile.pull(archive)
    assert (refused["rc"], refused["error"]["code"]) == (7, "bad-archive")
