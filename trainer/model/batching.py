"""How the target sees several documents at once, proven on the target itself before training.

A document's features must be those of the document alone: a drafter that learnt from features with
a neighbour in them is served without it. Full attention keeps documents of a packed row apart by
construction; a recurrent layer does so only in kernels that know where a document begins, so a
hybrid target is packed only where the self-test passes with the kernels that are active here.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import TargetError
from trainer.model import packed_attention, recurrent_kernels
from trainer.model.target import FULL, PACKED, ROWS, Target

AUTO = "auto"
# Mean of |difference| / |feature| over the tokens of a document. Rounding alone stays ten times
# below (bfloat16: 2**-8 a product); a neighbour's state is of the order of 1, and never so small.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# The first is the longest of the short ones; 70 is beyond a chunk of 64 of the delta rule; in one
# of three tokens every token lies within the reach of the convolution of four before it.
_LENGTHS = (9, 70, 3, 5, 3, 4)
_KERNELS = {
    "delta rule": recurrent_kernels.DELTA_RULE,
    "convolution": recurrent_kernels.CONVOLUTION,
}


@dataclass(frozen=True)
class BatchingFinding:
    """Result of the self-test of one way to join documents.

    max_difference: of a document beside others from the same one alone. max_leak: in the other
    documents, when the first one is replaced. Both relative, mean over a document's tokens, worst
    document. kernels: what computes attention and recurrent layers. error: why it did not run.
    """

    batching: str
    max_difference: float | None
    max_leak: float | None
    tolerance: float
    kernels: dict[str, str]
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether documents keep apart."""
        found = (self.max_difference, self.max_leak)
        return all(value is not None and value <= self.tolerance for value in found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"passed": self.passed}

    def __str__(self) -> str:
        kernels = ", ".join(f"{what}: {which}" for what, which in self.kernels.items())
        if self.error is not None:
            found = f"cannot run ({self.error})"
        else:
            found = (
                f"a document differs from itself alone by {self.max_difference:.1e}, and by"
                f" {self.max_leak:.1e} when its neighbour changes (limit {self.tolerance:.0e})"
            )
        return f"target batching {self.batching}: {found}; kernels: {kernels}"


def settle_batching(target: Target, wanted: str) -> BatchingFinding:
    """Choose how ``target`` joins documents, and return the self-test that allowed it.

    ``wanted``: rows, packed, or auto (packed where every layer is full attention and the self-test
    passes, else rows). Not while another thread uses the target.

    Raises: TargetError when packed is wanted and its self-test fails, or when rows mix documents.
    """
    if wanted == PACKED or (wanted == AUTO and target.layer_kinds == {FULL}):
        finding = check_batching(target, PACKED)
        if finding.passed:
            target.batching = PACKED
            return finding
        if wanted == PACKED:
            raise TargetError(f"{finding}; set target.batching to rows")
    target.batching = ROWS
    finding = check_batching(target, ROWS)
    if not finding.passed:
        raise TargetError(f"{finding}; a target whose documents change their neighbours is no use")
    return finding


def check_batching(target: Target, batching: str) -> BatchingFinding:
    """Compare documents side by side with each of them alone; the target keeps its own batching.

    ``batching``: rows or packed. Takes a few forwards of short documents.
    """
    documents = probe_documents(target)
    other = (documents[0] + 1) % target.head.embedding.shape[0]
    found: tuple[float | None, float | None] = (None, None)
    error = None
    try:
        if batching == PACKED:
            target.attend_by_document()
        alone = [target.document_features([one], ROWS)[0] for one in documents]
        together = target.document_features(documents, batching)
        beside = target.document_features([other, *documents[1:]], batching)
        found = _worst(alone, together), _worst(together[1:], beside[1:])
    # NotImplementedError: torch's word for an operation that this device does not have.
    except (TargetError, ValueError, TypeError, NotImplementedError) as caught:
        error = " ".join(str(caught).split())
    return BatchingFinding(
        batching, *found, TOLERANCES[target.dtype], active_kernels(target, batching), error
    )


def active_kernels(target: Target, batching: str) -> dict[str, str]:
    """Say what computes attention and, for a hybrid target, its recurrent layers, with versions."""
    how = target.text_config._attn_implementation
    how = "sdpa" if how == packed_attention.NAME else how
    kernels = {"attention": f"{how}{', by document' if batching == PACKED else ''}"}
    if target.recurrent_kinds:
        for what, names in _KERNELS.items():
            kernel = _kernel(target, names)
            kernels[what] = (
                f"torch {torch.__version__}" if kernel is None else recurrent_kernels.origin(kernel)
            )
    return kernels


def kernel_of_delta_rule(target: Target) -> Callable[..., Any] | None:
    """Return what computes the delta rule of a hybrid target, or None where it has none."""
    return _kernel(target, recurrent_kernels.DELTA_RULE)


def _kernel(target: Target, names: Sequence[str]) -> Callable[..., Any] | None:
    parts = (part for layer in target.layers for part in layer.modules())
    found = (recurrent_kernels.kernel_of(part, names) for part in parts)
    return next((one for one in found if one is not None), None)


def probe_documents(target: Target) -> list[Tensor]:
    """Ids spread over the vocabulary, the same on every call. Shapes: [length] each."""
    rows = target.head.embedding.shape[0]
    spread = torch.arange(sum(_LENGTHS)) * 7919 % rows
    return list(torch.split(spread, list(_LENGTHS)))


def _worst(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Relative difference, mean over the tokens of a document, of the worst document."""

    def difference(a: Tensor, b: Tensor) -> float:
        a, b = a.float(), b.float()
        return float(((b - a).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-30)).mean())

    return max(difference(a, b) for a, b in zip(wanted, found, strict=True))
