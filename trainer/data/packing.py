"""From samples to batches: which samples, in which rows, with which anchors.

A batch is a pure function of the run's seed and its index, so target threads may make batches in
any order and a resumed run goes on with the same ones.
"""

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.contract.config import DataConfig, TrainConfig
from trainer.data.anchors import anchor_seed, sample_anchors
from trainer.data.dataset import Dataset
from trainer.errors import DataError

ROW_MULTIPLE = 16  # row lengths are rounded up to this, so that few shapes occur
WINDOW_BATCHES = 64  # batches' worth of samples that are sorted by length together
OPEN_ROWS = 16  # packed rows that are filled at the same time
ANCHOR_MULTIPLE = 16  # anchors of a short row are rounded up to this
_PART = 1 << 16
_LOOK_AT_BATCHES = 256  # for a large one

Rows = list[list[int]]


@dataclass(frozen=True)
class Document:
    """Where a sample lies in a batch."""

    sample_id: int
    row: int
    start: int
    length: int


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Shapes: input_ids [R, S] int64; loss_mask [R, S] bool; document_ids [R, S] int32, the index in
    ``documents`` or -1 for padding; position_ids [R, S] int64, from 0 in each document;
    anchor_positions [R, N] int64, ascending row positions, 0 where padded; anchor_keep [R, N].
    """

    index: int
    epoch: int
    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    anchor_positions: Tensor
    anchor_keep: Tensor
    documents: tuple[Document, ...]
    num_tokens: int
    num_anchors: int

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Samples in the order of ``documents``."""
        return tuple(document.sample_id for document in self.documents)

    def document_tokens(self) -> list[Tensor]:
        """Token ids of each document, in the order of ``documents``. Shapes: [length] each."""
        return [self.input_ids[d.row, d.start : d.start + d.length] for d in self.documents]

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on ``device``; from pinned memory nothing waits."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned host memory; only where there is a GPU."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Keep the memory of its tensors until what ``stream`` has been given so far is done."""
        for tensor in self._tensors().values():
            tensor.record_stream(stream)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = {name: change(value) for name, value in self._tensors().items()}
        return replace(self, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Layout:
    """The batches of one epoch: ``members[starts[b] : starts[b + 1]]`` are batch b's samples.

    order: which batch comes when. Four bytes a sample; an epoch of lists would take a hundred.
    """

    members: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]

    def batch(self, place: int) -> list[int]:
        number = self.order[place]
        samples: list[int] = self.members[self.starts[number] : self.starts[number + 1]].tolist()
        return samples


class BatchPlan:
    """Which samples each batch holds; batch ``index`` counts through all epochs.

    Every epoch visits every sample once in its own order. Safe to share between threads.
    """

    def __init__(
        self, lengths: Sequence[int] | npt.NDArray[np.int64], config: DataConfig, seed: int
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        if not len(self._lengths):
            raise DataError("a plan needs at least one sample")
        longest = int(self._lengths.max())
        if longest > config.token_budget:
            raise DataError(
                f"data.token_budget {config.token_budget}: the longest sample has {longest} tokens"
            )
        self._config, self._seed = config, seed
        self._lock = threading.Lock()
        self._epochs: dict[int, _Layout] = {}
        self._ends: list[int] = []  # batches up to and with each epoch

    @property
    def batches_in_epoch(self) -> int:
        """Batches of the first epoch; later ones may differ by a few, see ``num_batches``."""
        return self.num_batches(1)

    def num_batches(self, epochs: float, at_most: int | None = None) -> int:
        """Batches in the first ``epochs`` epochs, at least 1; exact for whole numbers.

        No epoch is laid out beyond ``at_most`` batches, where that is given, nor are more told.
        """
        whole = int(epochs)
        with self._lock:
            if at_most is not None:
                for epoch in range(whole):
                    if self._end(epoch) >= at_most:
                        return at_most
            before = self._end(whole - 1)
            part = epochs - whole
            rest = round(part * (self._end(whole) - before)) if part else 0
        return max(1, before + rest if at_most is None else min(before + rest, at_most))

    def batch(self, index: int) -> tuple[int, Rows]:
        """Return (epoch, rows of sample positions); unpacked rows hold one sample each."""
        with self._lock:
            epoch = 0
            while self._end(epoch) <= index:
                epoch += 1
            samples = self._layout(epoch).batch(index - self._end(epoch - 1))
        return epoch, [samples] if self._config.packing else [[sample] for sample in samples]

    def _end(self, epoch: int) -> int:
        while len(self._ends) <= epoch:
            added = len(self._layout(len(self._ends)).order)
            self._ends.append((self._ends[-1] if self._ends else 0) + added)
        return self._ends[epoch] if epoch >= 0 else 0

    def shapes(self) -> list[tuple[int, int]] | None:
        """Return (rows, row length) of all batches of all epochs; None where nobody has said.

        ``anchors_of`` the row length completes them.
        """
        config = self._config
        if config.packing:
            return [(1, config.token_budget)]
        if config.row_lengths is None:
            return None
        widths = {row_length(length, config) for length in np.unique(self._lengths).tolist()}
        return [(rows_of(width, config), width) for width in sorted(widths)]

    def _layout(self, epoch: int) -> _Layout:
        if epoch not in self._epochs:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(len(self._lengths))
            members, starts = self._packed(order) if self._config.packing else self._rows(order)
            self._epochs = {k: v for k, v in self._epochs.items() if abs(k - epoch) <= 1}
            shuffled = rng.permutation(len(starts) - 1)
            self._epochs[epoch] = _Layout(members.astype(np.int32), starts, shuffled)
        return self._epochs[epoch]

    def _rows(
        self, order: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples of similar length side by side, each in its own row."""
        config = self._config
        window = WINDOW_BATCHES * config.max_batch_size
        # Longest first in each window; the shuffled order decides between equal lengths.
        members = order[np.lexsort((-self._lengths[order], np.arange(len(order)) // window))]
        lengths = self._lengths[members]
        starts = [0]
        while starts[-1] < len(members):
            start = starts[-1]
            room = rows_of(row_length(int(lengths[start]), config), config)
            end_of_window = (start // window + 1) * window
            starts.append(min(start + room, end_of_window, len(members)))
        return members, np.array(starts, np.int64)

    def _packed(
        self, order: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """One row of token_budget tokens a batch, filled first-fit over a few open rows.

        Rows close in the order in which they were opened, so a row's number is its batch.
        """
        most, budget = self._config.max_batch_size, self._config.token_budget
        numbers = array("i")  # row of each sample
        open_rows: list[list[int]] = []  # [tokens left, samples left, number], the oldest first
        opened = 0
        lengths = self._lengths[order]
        for length in chain.from_iterable(  # as Python numbers, a part at a time
            lengths[start : start + _PART].tolist() for start in range(0, len(lengths), _PART)
        ):
            for row in open_rows:
                if length <= row[0]:
                    break
            else:
                if len(open_rows) == OPEN_ROWS:
                    del open_rows[0]
                row = [budget, most, opened]
                open_rows.append(row)
                opened += 1
            row[0] -= length
            row[1] -= 1
            if not row[1]:
                row[0] = 0  # full: nothing is 0 tokens long
            numbers.append(row[2])
        rows = np.frombuffer(numbers, np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=opened))])
        return order[np.argsort(rows, kind="stable")], starts


class BatchMaker:
    """Makes batches; ``make`` is pure, so any thread may make any batch.

    Raises (constructor): DataError when the mask token occurs in the data.
    """

    def __init__(self, dataset: Dataset, plan: BatchPlan, config: TrainConfig) -> None:
        dataset.check_mask_token(config.draft.mask_token_id)
        self._samples, self._lengths = dataset.samples, dataset.lengths
        self._plan, self._config = plan, config

    def make(self, index: int) -> Batch:
        """Return batch ``index``, on the CPU."""
        epoch, rows = self._plan.batch(index)
        documents = self._documents(rows)
        return self._laid_out(index, epoch, documents, self._shape(documents, len(rows)))

    def examples(self) -> list[Batch]:
        """Return one batch of each shape that a run takes, with few samples in it.

        Without declared row lengths there is no end of shapes: then a large batch stands for all.
        """
        shapes = self._plan.shapes()
        if shapes is None:
            looked_at = range(min(_LOOK_AT_BATCHES, self._plan.batches_in_epoch))
            return [self.make(max(looked_at, key=self._padded_tokens))]
        lengths = np.asarray(self._lengths)
        found = []
        for shape in shapes:
            fitting = np.flatnonzero(lengths <= shape[1])
            sample = int(fitting[lengths[fitting].argmax()])
            found.append(self._laid_out(0, 0, self._documents([[sample]]), shape))
        return found

    def _padded_tokens(self, index: int) -> int:
        _, rows = self._plan.batch(index)
        return len(rows) * max(int(self._lengths[row].max()) for row in rows)

    def _shape(self, documents: tuple[Document, ...], num_rows: int) -> tuple[int, int]:
        data = self._config.data
        if data.packing:
            return num_rows, data.token_budget
        width = row_length(max(document.length for document in documents), data)
        return (num_rows if data.row_lengths is None else rows_of(width, data)), width

    def _laid_out(
        self, index: int, epoch: int, documents: tuple[Document, ...], shape: tuple[int, int]
    ) -> Batch:
        data = self._config.data
        ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask, owner = np.zeros(shape, np.bool_), np.full(shape, -1, np.int32)
        for number, document in enumerate(documents):
            sample = self._samples[document.sample_id]
            place = document.row, slice(document.start, document.start + document.length)
            ids[place], mask[place], owner[place] = sample.input_ids, sample.loss_mask, number
            positions[place] = np.arange(document.length)
        seeds = [anchor_seed(self._config.seed, epoch, d.sample_id) for d in documents]
        anchors, keep = sample_anchors(mask, owner, anchors_of(shape[1], data), seeds)
        return Batch(
            index=index,
            epoch=epoch,
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            document_ids=torch.from_numpy(owner),
            position_ids=torch.from_numpy(positions),
            anchor_positions=torch.from_numpy(anchors),
            anchor_keep=torch.from_numpy(keep),
            documents=documents,
            num_tokens=sum(d.length for d in documents),
            num_anchors=int(keep.sum()),
        )

    def _documents(self, rows: Rows) -> tuple[Document, ...]:
        documents: list[Document] = []
        for number, row in enumerate(rows):
            start = 0
            for sample_id in row:
                length = int(self._lengths[sample_id])
                documents.append(Document(sample_id, number, start, length))
                start += length
        return tuple(documents)


def row_length(longest: int, config: DataConfig) -> int:
    """Return the padded length of rows whose longest sample has ``longest`` tokens."""
    if config.row_lengths is not None:
        return next(length for length in config.row_lengths if length >= longest)
    return min(-(-longest // ROW_MULTIPLE) * ROW_MULTIPLE, config.token_budget)


def rows_of(width: int, config: DataConfig) -> int:
    """Return how many rows of this length a batch may have."""
    return min(config.max_batch_size, config.token_budget // width)


def anchors_of(width: int, config: DataConfig) -> int:
    """Return how many anchors rows of this length have, padded ones included.

    No more than data.max_anchors, and no more than there are places: the last token has no
    successor. So what is drawn is the same as with data.max_anchors in every row.
    """
    places = -(-(width - 1) // ANCHOR_MULTIPLE) * ANCHOR_MULTIPLE
    return max(1, min(config.max_anchors, places))


def most_anchors(config: DataConfig) -> int:
    """Return the anchors of the batch that has most of them, all rows together."""
    if config.packing:
        return anchors_of(config.token_budget, config)
    lengths = config.row_lengths or range(1, config.max_length + 1)
    widths = {row_length(length, config) for length in lengths}
    return max(rows_of(width, config) * anchors_of(width, config) for width in widths)


def place_features(
    per_document: Sequence[Tensor], batch: Batch, out: Tensor | None = None
) -> Tensor:
    """Lay the taps of each document where the batch has it; padding is 0.

    ``out``: where to; new memory where it is left out. Shapes: [length, n * D] in the order of
    batch.documents -> [R, S, n * D].
    """
    first = per_document[0]
    if out is None:
        out = first.new_empty(*batch.input_ids.shape, first.shape[-1])
    placed = out.zero_()
    for document, features in zip(batch.documents, per_document, strict=True):
        placed[document.row, document.start : document.start + document.length] = features
    return placed
