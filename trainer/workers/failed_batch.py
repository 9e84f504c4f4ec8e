"""A batch whose loss or gradient was not finite, kept with all that is needed to run it again.

One safetensors file in the run's directory: the batch, its hidden states, and the draft's
parameters as the forward used them. Its header carries the other facts as JSON.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.contract.durable import sync
from trainer.data.packing import Batch, Document
from trainer.errors import DataError
from trainer.workers.target import Prepared

VERSION = 1
_HIDDEN = "target_hidden"
_TENSORS = tuple(f.name for f in fields(Batch) if f.type in (Tensor, "Tensor"))


@dataclass(frozen=True)
class FailedBatch:
    """A batch and the weights that met it.

    step: the optimiser step, from 1, that was not taken. progress: share of the run that was done.
    draft: its parameters and buffers.
    """

    step: int
    rank: int
    progress: float
    reason: str
    prepared: Prepared
    draft: dict[str, Tensor]


def save_failed(run_dir: Path, failed: FailedBatch) -> Path:
    """Write failed_batch_STEP_rankR.safetensors, whole or not at all. Raises: OSError."""
    batch = failed.prepared.batch
    tensors = {f"batch/{name}": getattr(batch, name) for name in _TENSORS}
    tensors |= {f"draft/{name}": value for name, value in failed.draft.items()}
    tensors[_HIDDEN] = failed.prepared.target_hidden
    facts = {
        "v": VERSION,
        "step": failed.step,
        "rank": failed.rank,
        "progress": failed.progress,
        "reason": failed.reason,
        "index": batch.index,
        "epoch": batch.epoch,
        "num_tokens": batch.num_tokens,
        "num_anchors": batch.num_anchors,
        "documents": [asdict(document) for document in batch.documents],
    }
    path = run_dir / f"failed_batch_{failed.step:08d}_rank{failed.rank}.safetensors"
    partial = path.with_name(f".{path.name}.partial")
    own = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in tensors.items()}
    try:
        save_file(own, partial, metadata={"failed_batch": json.dumps(facts)})
        sync(partial)
        partial.replace(path)
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(f"{partial}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    sync(run_dir)
    return path


def load_failed(path: Path) -> FailedBatch:
    """Read what ``save_failed`` wrote, on the CPU. Raises: DataError naming the file."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["failed_batch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["v"] != VERSION:
            raise DataError(f"{path}: version {facts['v']}, this trainer reads {VERSION}")
        batch = Batch(
            index=facts["index"],
            epoch=facts["epoch"],
            documents=tuple(Document(**document) for document in facts["documents"]),
            num_tokens=facts["num_tokens"],
            num_anchors=facts["num_anchors"],
            **{name: tensors[f"batch/{name}"] for name in _TENSORS},
        )
        return FailedBatch(
            step=facts["step"],
            rank=facts["rank"],
            progress=facts["progress"],
            reason=facts["reason"],
            prepared=Prepared(batch, tensors[_HIDDEN]),
            draft={n[6:]: t for n, t in tensors.items() if n.startswith("draft/")},
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no batch that a run kept ({error})") from error
