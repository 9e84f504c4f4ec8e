"""known_hosts files: which keys stand for a host, in which line, and adding one.

Reads what OpenSSH reads: several names a line, ``*`` and ``?`` patterns, ``!`` negation, hashed
names, @revoked. @cert-authority lines are skipped: paramiko takes no host certificates.
Source: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT".
"""

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    file: Path
    line: int
    key_type: str
    blob: bytes
    revoked: bool

    @property
    def place(self) -> str:
        """``FILE:LINE``."""
        return f"{self.file}:{self.line}"


def fingerprint(blob: bytes) -> str:
    """Return the SHA256 fingerprint of a public key as ssh prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def host_key_name(hostname: str, port: int) -> str:
    """Return the name under which known_hosts holds the keys of ``hostname``."""
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find_keys(files: Sequence[Path], name: str) -> list[KnownKey]:
    """Return the keys that ``files`` hold for ``name``; files that cannot be read hold none."""
    found = []
    for file in files:
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for number, text in enumerate(lines, 1):
            key = _parse_line(file, number, text, name)
            if key is not None:
                found.append(key)
    return found


def add_key(file: Path, name: str, key_type: str, blob: bytes) -> None:
    """Append a key for ``name`` in one write, making the file and its directory when needed."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_line(file: Path, number: int, text: str, name: str) -> KnownKey | None:
    fields = text.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if marker == "@cert-authority" or len(fields) < 3 or not _names(fields[0], name):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(file, number, fields[1], blob, marker == "@revoked")


def _names(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns[3:].split("|", 1))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    matched = False
    for pattern in patterns.lower().split(","):
        # fnmatch takes [ for a set; known_hosts takes it for itself ([host]:port)
        wanted = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name, wanted):
            if pattern.startswith("!"):
                return False
            matched = True
    return matched
