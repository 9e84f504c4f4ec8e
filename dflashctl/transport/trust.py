"""The errors of host keys and logins, in the same words for every way."""

import base64
from collections.abc import Iterable
from pathlib import Path

from dflashctl.errors import TrustError

_SECURITY_KEYS = (b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com")


def unknown_key_error(place: str, *, offered: str, ssh_line: str) -> TrustError:
    """Return the error for a host that known_hosts does not name."""
    return TrustError(
        f"the host key is not known ({offered})",
        place=place,
        code="host-key",
        hint=f"compare it with the host's own (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub "
        f"there), then run the command again with --accept-new, or once: {ssh_line}",
    )


def changed_key_error(place: str, *, recorded: str, offered: str, removal: str) -> TrustError:
    """Return the error for a host key that differs from the recorded one."""
    return TrustError(
        f"the host key has changed; somebody may be in between\n"
        f"  recorded: {recorded}\n  offered:  {offered}",
        place=place,
        code="host-key-changed",
        hint=f"only if you know that the host got a new key: {removal}",
    )


def revoked_key_error(place: str, *, recorded: str) -> TrustError:
    """Return the error for a host key that known_hosts marks @revoked."""
    return TrustError(
        f"the host key is marked @revoked ({recorded})",
        place=place,
        code="host-key",
        hint="do not connect; ask who revoked it",
    )


def login_error(
    place: str, *, why: str, ssh_line: str, key_files: Iterable[str] = ()
) -> TrustError:
    """Return the error for a login that the host refused; ``key_files`` were tried."""
    on_tokens = [file for file in key_files if is_security_key(Path(file))]
    hint = (
        f"try: {ssh_line} true; name the key with identity_file in hosts.yaml, or load it "
        "with ssh-add (a key with a passphrase works through the agent only)"
    )
    if on_tokens:
        hint = (
            f"{on_tokens[0]} is a security key: plug it in and touch it when it blinks, with "
            "`backend: openssh` in hosts.yaml; one that asks for a PIN works through the agent "
            f"only, with any backend; try: {ssh_line} true"
        )
    return TrustError(f"the host refused the login: {why}", place=place, code="auth", hint=hint)


def is_security_key(file: Path) -> bool:
    """Say whether a private key file is a handle for a FIDO authenticator (ssh-keygen -t *-sk)."""
    try:
        lines = file.read_text("ascii").splitlines()
        blob = base64.b64decode("".join(lines[1:-1]))
    except (OSError, ValueError):
        return False
    return any(kind in blob for kind in _SECURITY_KEYS)
