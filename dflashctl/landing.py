"""Where a run has landed: the GPUs on which its node's driver lists processes of it.

CUDA takes the cards that its own order and the environment name; a library or a wrapper that sets
them anew puts a run on cards of another one. Only the driver knows, and only once memory is held.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dflashctl.errors import DflashctlError, MismatchError
from dflashctl.gpus import Probe, probe
from dflashctl.remote_run import layout_of
from dflashctl.transport.base import Transport
from trainer.contract.manifest import Manifest

_SOON_S, _SOON_FOR_S = 5.0, 60.0
_LATER_S = 30.0  # large targets load for minutes, and hold no memory of a drafter until then
_AT_MOST_S = 1800.0


@dataclass(frozen=True)
class Landing:
    """Which of its GPUs a run holds, by UUID; which not (yet); and others that it holds, in words.

    The words name each process by its container and both its pids.
    """

    landed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    strayed: tuple[str, ...] = ()

    def text(self, manifest: Manifest) -> str:
        """Say what is wrong; "" when nothing is."""
        if not self.strayed:
            return ""
        own = ", ".join(dict.fromkeys(str(g.index) for g in manifest.gpus if g.uuid is not None))
        return f"{manifest.tag} holds {'; '.join(self.strayed)}, and its own are GPU {own}"


def landing_of(manifest: Manifest, answer: Probe) -> Landing:
    """Judge what the node's driver lists; a driver that lists nothing proves nothing."""
    run_dir = str(layout_of(manifest).root)
    own = dict.fromkeys(gpu.uuid for gpu in manifest.gpus if gpu.uuid is not None)
    held, strayed = set(), []
    for gpu in answer.gpus:
        mine = [
            owner
            for owner in gpu.owners
            if owner.vmid == manifest.vmid and run_dir in owner.command.split()
        ]
        if mine:
            held.add(gpu.uuid)
        if mine and gpu.uuid not in own:
            strayed.append(f"GPU {gpu.index} ({gpu.uuid}): {mine[0].text()}")
    return Landing(
        landed=tuple(uuid for uuid in own if uuid in held),
        missing=tuple(uuid for uuid in own if uuid not in held),
        strayed=tuple(strayed),
    )


def stray_error(manifest: Manifest, landing: Landing) -> MismatchError:
    """Return the error for a run that holds cards which are not its own."""
    return MismatchError(
        landing.text(manifest),
        hint=f"dflashctl stop {manifest.tag}; then look for what sets CUDA_VISIBLE_DEVICES anew",
        place=manifest.place,
        code="gpu-strayed",
    )


class LandingWatch:
    """Looks from the node, every few seconds, until a run holds all of its GPUs or a strange one.

    Its thread ends then, after half an hour, or with the context. ``on_strayed`` gets the words, in
    that thread, once.
    """

    def __init__(
        self,
        connect_node: Callable[[], Transport],
        manifest: Callable[[], Manifest | None],
        on_strayed: Callable[[str], None],
    ) -> None:
        self._connect_node, self._manifest, self._on_strayed = connect_node, manifest, on_strayed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="landing")

    def __enter__(self) -> "LandingWatch":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End the looks; one that is on its way ends with the program."""
        self._stop.set()

    def _run(self) -> None:
        manifest: Manifest | None = None
        waited_s = 0.0
        while not self._stop.is_set() and waited_s < _AT_MOST_S:
            with suppress(DflashctlError):  # the view tells of lost links; the next look may work
                manifest = manifest or self._manifest()
                if manifest is None or self._look(manifest):
                    return
            pause_s = _SOON_S if waited_s < _SOON_FOR_S else _LATER_S
            self._stop.wait(pause_s)
            waited_s += pause_s

    def _look(self, manifest: Manifest) -> bool:
        """Look once; return whether there is nothing more to look for."""
        if not any(gpu.uuid for gpu in manifest.gpus):
            return True
        node = self._connect_node()
        try:
            answer = probe(node)
        finally:
            node.close()
        found = landing_of(manifest, answer)
        if found.strayed:
            self._on_strayed(found.text(manifest))
        return bool(found.strayed) or not found.missing or not answer.installed
