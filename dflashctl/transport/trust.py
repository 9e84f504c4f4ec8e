"""The errors of host keys and logins, in the same words for every way."""

from dflashctl.errors import TrustError


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


def login_error(place: str, *, why: str, ssh_line: str) -> TrustError:
    """Return the error for a login that the host refused."""
    return TrustError(
        f"the host refused the login: {why}",
        place=place,
        code="auth",
        hint=f"try: {ssh_line} true; name the key with identity_file in hosts.yaml, or load it "
        "with ssh-add (a key with a passphrase works through the agent only)",
    )
