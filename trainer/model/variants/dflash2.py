"""DFlash 2: short convolutions along the block, and a choice among candidates slot by slot.

Every attention and MLP sublayer of the block stream stands between two dynamic depth-wise
convolutions of two taps, which never reach across the block's start. The head's best candidates of
a slot are scored again together with the token chosen before. Fresh, both change nothing. Names
and meaning of the tensors are those of the published checkpoints (z-lab, Qwen3.8-27B-DFlash2).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainer.contract.config import LossConfig
from trainer.model.draft_config import DraftConfig
from trainer.model.head import HeadPass, head_loss
from trainer.model.layers import DraftLayer
from trainer.model.target import FrozenHead
from trainer.model.variants.variant import (
    HEAD_CHUNK_ROWS,
    BlockLoss,
    BlockRows,
    Extra,
    HeadRows,
    Variant,
)

TAPS = 2
_SIDES = 2  # before and after a sublayer
_INIT_STD = 0.02


class BlockConv(Extra):
    """The two convolutions around a sublayer; both kernels come from what the first one reads.

    out_t = (base_0 + c_0) * x_t + (base_1 + c_1) * x_(t-1), where the correction c of a slot is a
    projection of its hidden state and is shared by a group of channels.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.block_size = config.block_size
        self.num_groups = hidden // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(_SIDES, TAPS, hidden))
        self.kernel_projection = nn.Linear(hidden, _SIDES * TAPS * self.num_groups, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Make both the identity."""
        del generator
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve what a sublayer reads; the second value is for ``after``.

        Shapes: [R, N * B, D] -> [R, N * B, D], [R, N * B, taps, groups].
        """
        shape = (*x.shape[:-1], _SIDES, TAPS, self.num_groups)
        own, kept = self.kernel_projection(x).view(shape).unbind(-3)
        return self._convolve(x, own, 0), kept

    def after(self, x: Tensor, kept: Tensor) -> Tensor:
        """Convolve what a sublayer gave. Shapes: [R, N * B, D] -> [R, N * B, D]."""
        return self._convolve(x, kept, 1)

    def _convolve(self, x: Tensor, correction: Tensor, side: int) -> Tensor:
        size, groups = self.block_size, self.num_groups
        blocks = x.view(-1, size, groups, x.shape[-1] // groups)
        before = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))  # zero before a block's first slot
        base = self.base_kernel[side].view(TAPS, *blocks.shape[2:])
        own, previous = correction.reshape(-1, size, TAPS, groups, 1).unbind(2)
        return ((base[0] + own) * blocks + (base[1] + previous) * before).view(x.shape)


class DFlash2Layer(DraftLayer):
    """A draft layer whose sublayers stand between convolutions; the context is not convolved."""

    mixes_slots = True

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what attention reads of the block, and the kernels for its output."""
        return self.attention_conv.before(self.input_layernorm(x))

    def finish(self, x: Tensor, attended: Tensor, kept: Tensor | None) -> Tensor:
        """Add attention and MLP to the residual stream."""
        output = self.self_attn.output(attended)
        x = x + self.attention_conv.after(output, cast(Tensor, kept))
        read, kernels = self.mlp_conv.before(self.post_attention_layernorm(x))
        out: Tensor = x + self.mlp_conv.after(self.mlp(read), kernels)
        return out


class CandidateSelector(Extra):
    """Scores candidates b of a slot by U(b) + <A(a) * P h, B(b)>, a being the token before."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Leave the base logits alone at first: B is zero, and learns before A and P do."""
        self.hidden_projection.weight.normal_(0.0, _INIT_STD, generator=generator)
        self.predecessor_codebook.normal_(0.0, _INIT_STD, generator=generator)
        nn.init.zeros_(self.successor_codebook)

    def scores(self, hidden: Tensor, base: Tensor, candidates: Tensor, before: Tensor) -> Tensor:
        """Return the scores of the candidates, fp32.

        Shapes: hidden [M, D], base [M, k] logits, candidates [M, k] tokens, before [M] the tokens
        of the slots before -> [M, k].
        """
        gate = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)
        successors = F.embedding(candidates, self.successor_codebook)
        pairs: Tensor = (successors @ gate[..., None]).squeeze(-1)
        return base.float() + pairs.float()


class DFlash2(Variant):
    """Convolutions in the layers, a selector behind the head."""

    name = "dflash2"
    architecture = "DFlash2DraftModel"
    layer = DFlash2Layer

    def faults(self, config: DraftConfig) -> list[str]:
        """Return what of the configuration does not fit."""
        group, top_k = config.conv_group_size, config.selector_top_k
        rules = [
            (
                config.hidden_size % group == 0,
                f"conv_group_size {group}: does not divide hidden_size {config.hidden_size}",
            ),
            (
                top_k <= config.vocab_size,
                f"selector_top_k {top_k}: the vocabulary has {config.vocab_size} tokens",
            ),
        ]
        return [text for good, text in rules if not good]

    def modules(self, config: DraftConfig) -> dict[str, nn.Module]:
        """Return the selector."""
        return {"candidate_selector": CandidateSelector(config)}

    def tensor_shapes(self, config: DraftConfig) -> dict[str, tuple[int, ...]]:
        """Return the tensors of selector and convolutions: 3 + 4 * L."""
        hidden, codebook = config.hidden_size, (config.vocab_size, config.selector_rank)
        kernels = _SIDES * TAPS * hidden // config.conv_group_size
        shapes: dict[str, tuple[int, ...]] = {
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
            "candidate_selector.hidden_projection.weight": (config.selector_rank, hidden),
        }
        for i in range(config.num_draft_layers):
            for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                shapes[f"{conv}.base_kernel"] = (_SIDES, TAPS, hidden)
                shapes[f"{conv}.kernel_projection.weight"] = (kernels, hidden)
        return shapes

    def method_keys(self, config: DraftConfig) -> dict[str, Any]:
        """Return what engines read of convolutions and selector."""
        return {
            "conv_kernel_size": TAPS,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        }

    def settings(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the keys. Raises: ValueError for another number of taps."""
        if method["conv_kernel_size"] != TAPS:
            raise ValueError(f"conv_kernel_size {method['conv_kernel_size']}: only {TAPS} is known")
        names = ("conv_group_size", "selector_rank", "selector_top_k")
        return {name: method[name] for name in names}

    @torch.no_grad()
    def choose(self, draft: nn.Module, head: FrozenHead, hidden: Tensor, first: Tensor) -> Tensor:
        """Pick slot by slot, each with the token picked before it in mind."""
        selector = _selector(draft)
        rows, num_blocks = hidden[:, 1:].flatten(0, 1), len(hidden)
        best = [
            (rows[part] @ head.lm_head.t()).topk(selector.top_k, -1)
            for part in HeadPass(HEAD_CHUNK_ROWS).chunks(len(rows))
        ]
        shape = (num_blocks, -1, selector.top_k)
        base = torch.cat([one.values for one in best]).view(shape)
        candidates = torch.cat([one.indices for one in best]).view(shape)
        picked = [first]
        for slot in range(base.shape[1]):
            own = candidates[:, slot]
            scores = selector.scores(hidden[:, slot + 1], base[:, slot], own, picked[-1])
            picked.append(own.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1))
        return torch.stack(picked[1:], 1)

    def loss(
        self,
        draft: nn.Module,
        rows: BlockRows,
        head: HeadRows,
        how: HeadPass,
        config: LossConfig,
        progress: float,
    ) -> BlockLoss:
        """Add the selector's cross-entropy among the candidates, given the true token before.

        A row whose token is not among its candidates has none.
        """
        del progress
        selector = _selector(draft)
        how = replace(how, top_k=min(selector.top_k, len(head.table)))
        made = head_loss(rows.hidden, head.table, rows.labels, rows.weights, how)
        candidates = made.top_rows if head.ids is None else head.ids[made.top_rows]
        before = rows.take(rows.tokens[:, :-1])
        scores = selector.scores(rows.hidden, made.top, candidates, before)
        is_label = made.top_rows == rows.labels[:, None]
        place = is_label.int().argmax(-1)
        recalled, trained = is_label.any(-1), made.weights > 0
        weights = made.weights * recalled
        chosen = (F.cross_entropy(scores, place, reduction="none") * weights).sum()
        return BlockLoss(
            total=made.loss + config.selector_weight * chosen,
            weight_sum=made.weights.sum(),
            hit=recalled & (scores.argmax(-1) == place),
            figures={
                "candidate_recall_frac": torch.stack(
                    ((recalled & trained).sum(), trained.sum())
                ).double(),
                "selector_loss": torch.stack((chosen.detach(), weights.sum())).double(),
            },
        )


def _selector(draft: nn.Module) -> CandidateSelector:
    return cast(CandidateSelector, draft.get_submodule("candidate_selector"))
