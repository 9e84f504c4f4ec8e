"""What a kind of draft may change; plain DFlash changes nothing of it.

A variant holds no state: its modules live in the draft, under the names that the published
checkpoints give them. Source of the method: arXiv 2602.06036.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.contract.config import LossConfig
from trainer.model.draft_config import DraftConfig
from trainer.model.head import HeadPass, head_loss
from trainer.model.layers import DraftLayer
from trainer.model.target import FrozenHead

HEAD_CHUNK_ROWS = 1024  # rows of logits that drafting holds at one time


class Extra(nn.Module, ABC):
    """A module that plain DFlash does not have.

    It is initialised by itself and after all others, so that these are the same in every variant.
    """

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Draw the first weights."""


@dataclass(frozen=True)
class HeadRows:
    """The frozen head as a loss sees it: all of its rows, or those drawn for this batch.

    Shapes: table [V', D], embedding [V, D], ids [V'] the token of each row of table; None: all.
    """

    table: Tensor
    embedding: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True)
class BlockRows:
    """The drafted slots of a batch, one row each, in the order of blocks and slots.

    Shapes: hidden [M, D]; labels [M] rows of the head's table; weights [M], 0 where nothing is
    trained; tokens [K, B], what truly stands in each block, its anchor first; cells [M]: which of
    the K * (B - 1) drafted slots the rows are, None for all.
    """

    hidden: Tensor
    labels: Tensor
    weights: Tensor
    tokens: Tensor
    cells: Tensor | None

    @property
    def slots(self) -> Tensor:
        """Number of each drafted slot in its block. Shapes: [K, B - 1]."""
        num_blocks, size = self.tokens.shape
        return torch.arange(1, size, device=self.tokens.device).expand(num_blocks, -1)

    def take(self, values: Tensor) -> Tensor:
        """Return the rows' part of values of all drafted slots. Shapes: [K, B - 1, *] -> [M, *]."""
        flat = values.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]


@dataclass(frozen=True)
class BlockLoss:
    """Sums of a loss over the rows.

    total: differentiable. weight_sum: what divides it. hit [M]: whether drafting, given the true
    tokens before a slot, finds its token. figures: numerator and denominator [2] by event key.
    """

    total: Tensor
    weight_sum: Tensor
    hit: Tensor
    figures: dict[str, Tensor] = field(default_factory=dict)


class Variant:
    """Plain DFlash's answers; a variant overrides what differs.

    name: of draft.variant. architecture: in config.json. layer: class of the draft's layers.
    """

    name: ClassVar[str]
    architecture: ClassVar[str]
    layer: ClassVar[type[DraftLayer]] = DraftLayer

    def faults(self, config: DraftConfig) -> list[str]:
        """Return what of the configuration does not fit, each beginning with its setting."""
        del config
        return []

    def modules(self, config: DraftConfig) -> dict[str, nn.Module]:
        """Return further modules of the draft by name."""
        del config
        return {}

    def tensor_shapes(self, config: DraftConfig) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the tensors that plain DFlash does not have."""
        del config
        return {}

    def method_keys(self, config: DraftConfig) -> dict[str, Any]:
        """Return further keys of dflash_config in the export."""
        del config
        return {}

    def owns(self, architectures: Sequence[str], method: Mapping[str, Any]) -> bool:
        """Whether a config.json with these architectures and dflash_config is of this kind."""
        del method
        return self.architecture in architectures

    def settings(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """Return the DraftConfig fields that ``method_keys`` wrote. Raises: KeyError."""
        del method
        return {}

    @torch.no_grad()
    def choose(self, draft: nn.Module, head: FrozenHead, hidden: Tensor, first: Tensor) -> Tensor:
        """Draft greedily from the blocks' hidden states.

        Shapes: hidden [K, B, D], first [K] the blocks' anchor tokens -> [K, B - 1].
        """
        del draft, first
        rows = hidden[:, 1:].flatten(0, 1)
        guesses = [
            (rows[part] @ head.lm_head.t()).argmax(-1)
            for part in HeadPass(HEAD_CHUNK_ROWS).chunks(len(rows))
        ]
        return torch.cat(guesses).view(len(hidden), -1)

    def loss(
        self,
        draft: nn.Module,
        rows: BlockRows,
        head: HeadRows,
        how: HeadPass,
        config: LossConfig,
        progress: float,
    ) -> BlockLoss:
        """Return the loss of the rows; ``progress``: share of the run's steps that are done."""
        del draft, config, progress
        made = head_loss(rows.hidden, head.table, rows.labels, rows.weights, how)
        return BlockLoss(made.loss, made.weights.sum(), made.hit)
