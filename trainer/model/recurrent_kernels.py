"""Which kernels the recurrent layers of a hybrid target use, and where they come from.

transformers takes the delta rule from the package ``fla`` and the short convolution from
``causal_conv1d``, and falls back in silence to functions written in torch. The latter package has
to be built for each version of torch; fla has the same convolution as a Triton kernel, which
``offer_convolution`` puts in its place.
"""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

DELTA_RULE = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")
CONVOLUTION = ("causal_conv1d_fn",)
_DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
# Only these layers call the convolution alone; others import more of the package than is offered.
_OFFERED_TO = ("qwen3_5", "qwen3_next")


def offer_convolution(model_type: str) -> bool:
    """Let transformers find fla's Triton convolution under the name ``causal_conv1d``.

    Does so for a model that needs it, where fla is installed and causal_conv1d is not; before
    transformers first imports the model. Returns whether it is offered.
    """
    if not model_type.startswith(_OFFERED_TO):
        return False
    if "causal_conv1d" in sys.modules or importlib.util.find_spec("causal_conv1d") is not None:
        return sys.modules.get("causal_conv1d") is not None and _is_offered()
    try:
        ours: Any = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except (ImportError, AttributeError, RuntimeError):  # the last: Triton found no GPU
        return False

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
    ) -> Tensor:
        """Shapes: x [R, C, S], weight [C, taps] -> [R, C, S]; boundaries [documents + 1]."""
        found = ours(
            x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q
        )
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    causal_conv1d_fn.__module__ = "fla.modules.causal_conv1d"
    module = types.ModuleType("causal_conv1d", "fla's convolution, offered by the trainer")
    module.__spec__ = importlib.machinery.ModuleSpec("causal_conv1d", None)
    module.causal_conv1d_fn = causal_conv1d_fn  # type: ignore[attr-defined]
    sys.modules["causal_conv1d"] = module
    return True


def _is_offered() -> bool:
    found = getattr(sys.modules["causal_conv1d"], "causal_conv1d_fn", None)
    return getattr(found, "__module__", "").startswith("fla")


def kernel_of(part: nn.Module, names: Sequence[str]) -> Callable[..., Any] | None:
    """Return the function that a layer uses: its own attribute, else one of its module's."""
    if not any(isinstance(child, nn.Conv1d) for child in part.children()):
        return None
    for name in names:
        found = getattr(part, name, None) or vars(sys.modules[type(part).__module__]).get(name)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def is_fallback(function: Callable[..., Any]) -> bool:
    """Say whether a kernel is transformers' own, written in torch: it knows no documents."""
    return str(_implementation(function).__module__).partition(".")[0] == "transformers"


def origin(function: Callable[..., Any]) -> str:
    """Return the package of a function and its version; transformers' own are written in torch."""
    if is_fallback(function):
        return f"torch {torch.__version__} (the fallback of transformers)"
    package = str(_implementation(function).__module__).partition(".")[0]
    name = _DISTRIBUTIONS.get(package, package)
    for candidate in (name, f"{package}-core"):
        try:
            return f"{candidate} {importlib.metadata.version(candidate)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return name


def _implementation(function: Callable[..., Any]) -> Any:
    if inspect.isfunction(function):  # transformers wraps the function it has chosen
        return inspect.getclosurevars(function).nonlocals.get("implementation", function)
    return function
