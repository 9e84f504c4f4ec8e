"""known_hosts as OpenSSH reads it; ssh-keygen -F is the reference."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dflashctl.transport.known_hosts import add_key, find_keys, fingerprint, host_key_name


@pytest.fixture
def key(tmp_path: Path, make_key: Callable[[Path], None]) -> str:
    """``ssh-ed25519 AAAA...``."""
    make_key(tmp_path / "key")
    return " ".join((tmp_path / "key.pub").read_text().split()[:2])


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        ("near", "near", True),
        ("NEAR", "near", True),
        ("near", "nearer", False),
        ("far,near", "near", True),
        ("ne?r", "near", True),
        ("*.lan", "near.lan", True),
        ("*.lan,!near.lan", "near.lan", False),
        ("[near]:2206", "[near]:2206", True),
        ("[near]:2206", "near", False),
        ("near", "[near]:2206", False),
    ],
)
def test_names_match_as_ssh_keygen_says(
    tmp_path: Path, key: str, names: str, asked: str, *, found: bool
) -> None:
    file = tmp_path / "known"
    file.write_text(f"# first\n\n{names} {key} comment\n")
    keys = find_keys([file], asked)
    assert [item.line for item in keys] == ([3] if found else [])
    argv = ["ssh-keygen", "-F", asked, "-f", str(file)]
    reference = subprocess.run(argv, capture_output=True, check=False)
    assert (reference.returncode == 0) is found


def test_broken_lines_and_missing_files_hold_no_key(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_bytes(
        b"near\nnear ssh-rsa\nnear ssh-rsa !!!\n|1|x|y ssh-rsa AAAA\n\xff\xfe\n@revoked\n"
    )
    assert find_keys([file, tmp_path / "none"], "near") == []


def test_revoked_marker_is_kept_and_authorities_are_not_taken_for_keys(
    tmp_path: Path, key: str
) -> None:
    file = tmp_path / "known"
    file.write_text(f"@revoked near {key}\n@cert-authority near {key}\n")
    assert [(item.line, item.revoked) for item in find_keys([file], "near")] == [(1, True)]


def test_added_key_is_found_again_after_a_file_without_last_newline(
    tmp_path: Path, key: str
) -> None:
    file = tmp_path / "deep" / "known"
    add_key(file, "far", "ssh-ed25519", b"other")
    file.write_bytes(file.read_bytes().rstrip())
    add_key(file, "near", "ssh-ed25519", b"blob")
    assert [(item.line, item.blob) for item in find_keys([file], "near")] == [(2, b"blob")]
    assert file.stat().st_mode & 0o777 == 0o600
    assert key


def test_fingerprint_is_that_of_ssh_keygen(tmp_path: Path, key: str) -> None:
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True
    )
    file = tmp_path / "known"
    file.write_text(f"near {key}\n")
    assert fingerprint(find_keys([file], "near")[0].blob) == listed.stdout.split()[1]


def test_port_22_is_not_written() -> None:
    assert host_key_name("Near", 22) == "near"
    assert host_key_name("near", 2206) == "[near]:2206"
