"""Files that matter: written elsewhere, synced, renamed; a kill leaves the old or the new."""

import os
from pathlib import Path


def write_by_rename(path: Path, data: bytes) -> None:
    """Replace the file at ``path``, whose directory must be there, in one step that lasts.

    Raises: OSError naming ``path`` (a full disk names none by itself); the old file is untouched
    then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync(path.parent)


def is_named(descriptor: int, path: Path) -> bool:
    """Say whether an open file is still the one at ``path``.

    Who locks a file that its holder removes at its end may get the lock of a file without a name.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a directory, survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
