"""manifest.json: everything that was pinned when a run was launched."""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from trainer.contract.errors import ManifestError

VERSION = 1


@dataclass(frozen=True)
class Gpu:
    """One GPU of a run: its index and UUID on the node (None only with ``device: cpu``)."""

    role: str  # "target" or "drafter"
    index: int | None
    uuid: str | None
    name: str | None


@dataclass(frozen=True)
class Manifest:
    """Facts of one launch; written once and never changed.

    A fact that cannot be learnt stops the launch: there is no "unknown". ``config`` is the whole
    training configuration as ``TrainConfig.to_dict`` gives it, ``packages`` the versions installed
    in the container, ``git_commit`` None only when the release came out of an installed wheel
    (then ``dflashctl_version`` names it). ``check``: passed, or skipped by --skip-check; none when
    the launching program was older than the check. ``warmup``: fresh, stale (made for something
    else) or none. ``driver``: version of the NVIDIA kernel module, None where there is none.
    ``experiments``: settings of ``config`` under which the run proves nothing of others.
    """

    run_id: str
    tag: str
    created_unix_s: float
    dflashctl_version: str
    release: str
    git_commit: str | None
    git_dirty: bool | None
    packages: dict[str, str]
    host: str
    vmid: int | None
    gpus: tuple[Gpu, ...]
    python: str
    workspace: str
    log_path: str
    cache_dir: str
    target_revision: str
    dataset_sha256: str
    config: dict[str, Any]
    seed: int
    argv: tuple[str, ...]
    check: str = "none"
    warmup: str = "none"
    driver: str | None = None
    experiments: tuple[str, ...] = ()
    v: int = VERSION

    @property
    def place(self) -> str:
        """Where it runs, as hosts.yaml names it: ``kpro6/200``, or ``kpro6/self``."""
        return f"{self.host}/{'self' if self.vmid is None else self.vmid}"

    def devices(self, role: str) -> list[Gpu]:
        """Return the GPUs of ``role`` in the order of hosts.yaml."""
        return [gpu for gpu in self.gpus if gpu.role == role]

    def to_json(self) -> str:
        """Return the manifest as one JSON document."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read a manifest; unknown keys are skipped.

        Raises: ManifestError for a missing fact, a wrong type or a newer major version.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"manifest.json is not JSON: {error}") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("v"), int):
            raise ManifestError("manifest.json has no version 'v'")
        if raw["v"] > VERSION:
            raise ManifestError(
                f"manifest.json has version {raw['v']}, this reader knows {VERSION}"
            )
        missing = sorted({f.name for f in fields(cls) if f.default is MISSING} - raw.keys())
        if missing:
            raise ManifestError(f"manifest.json lacks {', '.join(missing)}")
        known = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        for name, kind in _KINDS.items():
            if name in known and not isinstance(known[name], kind):
                raise ManifestError(
                    f"manifest.json: {name} is {known[name]!r}, not {kind.__name__}"
                )
        try:
            known["gpus"] = tuple(_gpu(gpu) for gpu in known["gpus"])
        except (KeyError, TypeError) as error:
            raise ManifestError(f"manifest.json: a GPU lacks {error}") from error
        known["argv"] = tuple(known["argv"])
        known["experiments"] = tuple(known.get("experiments", ()))
        return cls(**known)


# What a reader would trip over; null stands only where the class allows None.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("run_id", "tag", "release", "host", "python", "workspace"), str),
    **dict.fromkeys(
        ("log_path", "cache_dir", "target_revision", "dataset_sha256", "check", "warmup"), str
    ),
    **dict.fromkeys(("packages", "config"), dict),
    **dict.fromkeys(("gpus", "argv", "experiments"), list),
    "seed": int,
}


def _gpu(raw: dict[str, Any]) -> Gpu:
    return Gpu(**{f.name: raw[f.name] for f in fields(Gpu)})
