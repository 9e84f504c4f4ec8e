"""What the compile gate sets, reads and counts of torch's compiler; torch 2.11 to 2.14 alike.

What of it is process-wide and what belongs to a thread differs between versions; callers treat all
settings as a thread's own (set and checked in each) and the rest as process-wide. The compiler's
modules take seconds to import and are imported when first used: a run without compile needs none.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import CompileGateError

# Counters of torch._dynamo.utils, as an event names them.
_CACHES = {
    "fx_hit": ("inductor", "fxgraph_cache_hit"),
    "fx_miss": ("inductor", "fxgraph_cache_miss"),
    "fx_bypass": ("inductor", "fxgraph_cache_bypass"),
    "aot_hit": ("aot_autograd", "autograd_cache_hit"),
    "aot_miss": ("aot_autograd", "autograd_cache_miss"),
    "aot_bypass": ("aot_autograd", "autograd_cache_bypass"),
}


@dataclass(frozen=True)
class Counted:
    """What was compiled since the start of the process, and what the caches on disk gave."""

    num_graphs: int
    cache: Mapping[str, int]

    @classmethod
    def now(cls) -> "Counted":
        """Read the counters."""
        counters = _module("_dynamo.utils").counters
        cache = {name: int(counters[part].get(key, 0)) for name, (part, key) in _CACHES.items()}
        return cls(int(counters["stats"].get("unique_graphs", 0)), cache)

    def since(self, before: "Counted") -> "Counted":
        """Return the difference; of the caches, what is not zero."""
        cache = {name: count - before.cache[name] for name, count in self.cache.items()}
        changed = {name: count for name, count in cache.items() if count}
        return Counted(self.num_graphs - before.num_graphs, changed)


def configure(settings: Mapping[str, Any]) -> None:
    """Set the compiler's settings (dotted, below torch) in this thread; each must hold.

    From torch 2.12 on another thread does not see them. Raises: CompileGateError.
    """
    for dotted, value in settings.items():
        place, _, name = dotted.rpartition(".")
        config = _module(place)
        setattr(config, name, value)
        if getattr(config, name) != value:
            raise CompileGateError(f"torch does not keep the setting {dotted} = {value}")


def set_stance(stance: str) -> None:
    """Set what a step that is not compiled yet does, for all threads."""
    torch.compiler.set_stance(stance)


def listen(notice: Callable[[Any], None]) -> None:
    """Have every start of a compile told; torch._dynamo.reset() forgets listeners."""
    handler = _module("_dynamo.callback").callback_handler
    if notice not in handler.start_callbacks:
        handler.register_start_callback(notice)


def stop_listening(notice: Callable[[Any], None]) -> None:
    """Undo ``listen``."""
    handler = _module("_dynamo.callback").callback_handler
    if notice in handler.start_callbacks:
        handler.remove_start_callback(notice)


def recent_reasons(num_graphs: int) -> list[str]:
    """Return why the last compiles happened; torch gives a reason for recompiles only."""
    if not num_graphs:
        return []
    metrics = _module("_dynamo.utils").get_compilation_metrics()[-num_graphs:]
    return [str(m.recompile_reason) for m in metrics if getattr(m, "recompile_reason", None)]


def keeps_traces() -> bool:
    """Say whether torch keeps what it traced on disk; it fails in 2.13 and was not tried before."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def save_artifacts() -> bytes | None:
    """Return what this process compiled or loaded, for hosts of the same kind; None is nothing."""
    saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else saved[0]


def load_artifacts(data: bytes) -> bool:
    """Put artefacts into the cache directory; False when torch cannot read them."""
    return torch.compiler.load_cache_artifacts(data) is not None


def _module(name: str) -> Any:
    return importlib.import_module(f"torch.{name}")
