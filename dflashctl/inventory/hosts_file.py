"""hosts.yaml: where it is found, and what each of its keys means."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflashctl.errors import ConfigurationError, UsageError
from dflashctl.inventory.document import Value, read_document
from dflashctl.inventory.model import Container, Expect, Host, Inventory

FILE_NAME = "hosts.yaml"

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_ADDRESS = r"([A-Za-z0-9_][^\s@:/]*@)?[A-Za-z0-9_:\[][^\s@/]*"
_GPU = r"(GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]*"
_MAX_GPU_INDEX = 255

Reader = Callable[[Value], Any]


def find_inventory(explicit: Path | None, cwd: Path, environ: Mapping[str, str]) -> Path:
    """Return the hosts.yaml to use.

    Order: ``explicit`` (--config), DFLASHCTL_CONFIG, hosts.yaml upward from ``cwd`` (as far as
    the root of its git repository), then the user's configuration directory.
    Raises: UsageError when there is none, naming `dflashctl init`.
    """
    named = explicit or (
        Path(environ["DFLASHCTL_CONFIG"]) if environ.get("DFLASHCTL_CONFIG") else None
    )
    if named is not None:
        if named.is_file():
            return named
        origin = "--config" if explicit else "DFLASHCTL_CONFIG"
        raise UsageError(
            f"{origin} names {named}, and there is no such file",
            hint=f"name another, or write a first one: dflashctl init {named.parent}",
        )
    for directory in (cwd, *cwd.parents):
        if (directory / FILE_NAME).is_file():
            return directory / FILE_NAME
        if (directory / ".git").exists():
            break
    base = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME') or Path.home()}/.config"
    user_file = Path(base) / "dflashctl" / FILE_NAME
    if user_file.is_file():
        return user_file
    raise UsageError(
        f"no {FILE_NAME} found in {cwd} or above, nor {user_file}",
        hint="`dflashctl init` writes a commented one here; --config FILE names another",
    )


def load_inventory(path: Path) -> Inventory:
    """Read and check the hosts.yaml at ``path``.

    Raises: ConfigurationError whose place is ``hosts.yaml:14:11`` and whose message shows the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", place=str(path)) from error
    return parse_inventory(data, path)


def parse_inventory(data: bytes, path: Path) -> Inventory:
    """Return the inventory that ``data`` describes; relative files are seen from ``path``.

    Raises: ConfigurationError.
    """
    root = read_document(data, _shown(path))
    keys = root.mapping(["version", "hosts"])
    if "version" not in keys:
        raise root.error("the key 'version' is missing", hint="begin the file with: version: 1")
    keys["version"].integer(1, 1, "the version this dflashctl reads,")
    if "hosts" not in keys:
        raise root.error("the key 'hosts' is missing", hint="`dflashctl init` shows the form")
    entries = keys["hosts"].entries()
    if not entries:
        raise keys["hosts"].error("no host is named")
    hosts = tuple(_host(key, value, path.absolute().parent) for key, value in entries)
    _refuse_shadowed_names(hosts, entries)
    return Inventory(path, hosts)


def _shown(path: Path) -> str:
    """Return ``path`` as short as the user would write it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return str(path)


def _refuse_shadowed_names(hosts: tuple[Host, ...], entries: list[tuple[Value, Value]]) -> None:
    """A group must not be called like a host: --limit could not tell them apart."""
    names = {host.name for host in hosts}
    for host, (key, _) in zip(hosts, entries, strict=True):
        groups = [*host.groups, *(name for item in host.containers for name in item.groups)]
        for group in groups:
            if group in names:
                raise key.error(f"the group {group!r} has the name of a host")


def _host(key: Value, value: Value, directory: Path) -> Host:
    name = key.name("a host name (letters, digits, . _ -)", _NAME)

    def file(item: Value) -> str:
        try:
            return str(directory / Path(item.text("a file name")).expanduser())
        except RuntimeError:  # ~user, and no such user
            raise item.error("the home directory of that user is not known") from None

    readers: dict[str, Reader] = {
        "address": lambda item: item.name("a host name or user@host", _ADDRESS),
        "port": lambda item: item.integer(1, 65535, "a port"),
        "jump": lambda item: item.name("a jump host, as for ssh -J", r"[^\s-][^\s]*"),
        "backend": lambda item: item.choice(["fabric", "openssh", "local"]),
        "identity_file": file,
        "ssh_config": file,
        "known_hosts": file,
        "connect_timeout_s": lambda item: item.number(0.1, 3600, "seconds"),
        "become": lambda item: item.choice(["auto", "none", "sudo"]),
        "groups": _groups,
        "expect": _expect,
        "containers": lambda item: _containers(item, name),
    }
    settings = {item: readers[item](found) for item, found in value.mapping(list(readers)).items()}
    if "containers" not in settings:
        raise key.error("the host has no 'containers'", hint="write `containers: {200: {}}`")
    if settings.get("backend") == "local":
        settings.setdefault("address", "")
    elif "address" not in settings:
        raise key.error("the host has no 'address'", hint="write `address: root@10.1.2.6`")
    return Host(name=name, **settings)


def _containers(value: Value, host_name: str) -> tuple[Container, ...]:
    entries = value.entries()
    if not entries:
        raise value.error("no container is named", hint="`self` stands for the host itself")
    return tuple(_container(key, item, host_name) for key, item in entries)


def _container(key: Value, value: Value, host_name: str) -> Container:
    vmid = None
    if key.node.value != "self":
        vmid = key.integer(100, 999_999_999, "`self` or a vmid")
    readers: dict[str, Reader] = {
        "workspace": _directory,
        "python": _program,
        "gpus": _gpus,
        "log_dir": _directory,
        "env": _environment,
        "groups": _groups,
        "expect": _expect,
        "pip_args": lambda item: tuple(one.text("an argument") for one in item.items()),
    }
    settings = {item: readers[item](found) for item, found in value.mapping(list(readers)).items()}
    target, drafter = settings.pop("gpus", ((), ()))
    return Container(host_name=host_name, vmid=vmid, target=target, drafter=drafter, **settings)


def _directory(value: Value) -> str:
    what = "an absolute path of the container"
    content = value.text(what)
    if not content.startswith("/"):
        raise value.expected(what, hint="it begins with /; ~ is not expanded there")
    return content


def _program(value: Value) -> str:
    what = "an absolute path of the container, or a program on its PATH"
    content = value.text(what)
    if not re.fullmatch(r"/.+|[A-Za-z0-9_][A-Za-z0-9._+-]*", content):
        raise value.expected(what)
    return content


def _groups(value: Value) -> tuple[str, ...]:
    return tuple(
        item.name("a group name (letters, digits, . _ -)", _NAME) for item in value.items()
    )


def _environment(value: Value) -> dict[str, str]:
    result = {}
    for key, item in value.entries():
        name = key.name("the name of an environment variable", _VARIABLE)
        result[name] = item.text("text", or_integer=True)
    return result


def _expect(value: Value) -> Expect:
    readers: dict[str, Reader] = {
        "count": lambda item: item.integer(0, _MAX_GPU_INDEX + 1, "a number of GPUs"),
        "model": lambda item: item.text("a part of the name that nvidia-smi shows"),
    }
    found = value.mapping(list(readers))
    return Expect(**{item: readers[item](given) for item, given in found.items()})


def _gpus(value: Value) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (target, drafter). A GPU stands once in a role, and may have both."""
    roles: dict[str, tuple[str, ...]] = {"target": (), "drafter": ()}
    for role, listed in value.mapping(list(roles)).items():
        gpus = []
        for item in listed.items("a list of GPUs, such as [0, 1]"):
            gpu = _gpu(item)
            if gpu != "cpu" and gpu in gpus:
                raise item.error(f"GPU {gpu} is listed already under {role}")
            gpus.append(gpu)
        roles[role] = tuple(gpus)
    return roles["target"], roles["drafter"]


def _gpu(value: Value) -> str:
    what = "a GPU index, a GPU-... UUID, or cpu"
    content = value.node.value
    if isinstance(content, str) and re.fullmatch(r"[A-Za-z].*", content):
        return value.name(what, f"cpu|{_GPU}")
    return str(value.integer(0, _MAX_GPU_INDEX, f"{what}; an index"))
