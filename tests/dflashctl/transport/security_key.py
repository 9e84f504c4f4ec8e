"""A security key in software: an ssh-agent with one sk-ssh-ed25519 key, which signs as FIDO does.

A real authenticator signs the digest of the application's name, its flags, a counter and the digest
of the message (OpenSSH's PROTOCOL.u2f); sshd checks all of that, and that a user was present.
"""

import base64
import hashlib
import itertools
import socket
import struct
import threading
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KIND = b"sk-ssh-ed25519@openssh.com"
APPLICATION = b"ssh:"
_USER_PRESENT = 1
_FAILURE, _ASK_KEYS, _KEYS, _SIGN, _SIGNED = 5, 11, 12, 13, 14


def text(data: bytes) -> bytes:
    """Return an SSH string."""
    return struct.pack(">I", len(data)) + data


class SecurityKey:
    """One key; it answers as an agent at ``path`` until ``close``."""

    def __init__(self, path: Path) -> None:
        self.num_signed = 0
        self._key = Ed25519PrivateKey.generate()
        self._counter = itertools.count(1)
        self._public = self._key.public_key().public_bytes_raw()
        self.blob = text(KIND) + text(self._public) + text(APPLICATION)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def public_line(self) -> str:
        """As authorized_keys names it."""
        return f"{KIND.decode()} {base64.b64encode(self.blob).decode()} in software\n"

    def private_file(self) -> str:
        """As ssh-keygen writes it: a handle that only the authenticator can use."""
        secret = text(KIND) + text(self._public) + text(APPLICATION)
        secret += bytes([_USER_PRESENT]) + text(b"handle") + text(b"")
        secret = b"\x01\x02\x03\x04" * 2 + secret + text(b"in software")
        secret += bytes(range(1, 1 + -len(secret) % 8))
        head = b"openssh-key-v1\0" + text(b"none") + text(b"none") + text(b"") + b"\0\0\0\1"
        data = base64.encodebytes(head + text(self.blob) + text(secret)).decode()
        return f"-----BEGIN OPENSSH PRIVATE KEY-----\n{data}-----END OPENSSH PRIVATE KEY-----\n"

    def close(self) -> None:
        """Take the key out."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as stream:
            while head := stream.read(4):
                message = stream.read(struct.unpack(">I", head)[0])
                client.sendall(text(self._answer(message[0], message[1:])))

    def _answer(self, kind: int, body: bytes) -> bytes:
        if kind == _ASK_KEYS:
            return bytes([_KEYS]) + b"\0\0\0\1" + text(self.blob) + text(b"in software")
        if kind != _SIGN or not body.startswith(text(self.blob)):
            return bytes([_FAILURE])
        rest = body[len(text(self.blob)) :]
        message = rest[4 : 4 + struct.unpack(">I", rest[:4])[0]]
        self.num_signed += 1
        told = bytes([_USER_PRESENT]) + struct.pack(">I", next(self._counter))
        digests = [hashlib.sha256(data).digest() for data in (APPLICATION, message)]
        signature = self._key.sign(digests[0] + told + digests[1])
        return bytes([_SIGNED]) + text(text(KIND) + text(signature) + told)
