"""Domino: the logits of a slot are corrected by what stands before it in the block.

A small GRU runs over the embeddings of the block's earlier tokens (the true ones in training, the
drafted ones in decoding); its state and the slot's hidden state give a low-rank correction of the
head's logits, from the second drafted slot on. Source: arXiv 2605.29707; tensors carry the
published names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainer.contract.config import LossConfig
from trainer.model.draft_config import DraftConfig
from trainer.model.head import HeadPass, Products, chunk_loss
from trainer.model.logits import logits_memory
from trainer.model.target import FrozenHead
from trainer.model.variants.variant import (
    HEAD_CHUNK_ROWS,
    BlockLoss,
    BlockRows,
    Extra,
    HeadRows,
    Variant,
)

FIRST_CORRECTED = 2  # slot 1 follows the anchor alone, which the draft has seen already
_GATES = 3
_INIT_STD = 0.02
_PUBLISHED = {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": False}


class PrefixGru(Extra):
    """A GRU without biases, one layer; weights and their order are those of torch.nn.GRU.

    Written out because its parameters are views of the optimiser's memory, which the fused kernels
    would copy in each call, and because decoding takes it step by step.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.hidden_dim = config.gru_hidden_dim
        width = _GATES * self.hidden_dim
        self.weight_ih_l0 = nn.Parameter(torch.empty(width, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(width, self.hidden_dim))

    def reset(self, generator: torch.Generator) -> None:
        """Draw uniformly, as torch.nn.GRU does."""
        bound = self.hidden_dim**-0.5
        self.weight_ih_l0.uniform_(-bound, bound, generator=generator)
        self.weight_hh_l0.uniform_(-bound, bound, generator=generator)

    def first_state(self, num_blocks: int) -> Tensor:
        """Return the state before any token. Shapes: [K, H]."""
        return self.weight_hh_l0.new_zeros(num_blocks, self.hidden_dim)

    def project(self, embeddings: Tensor) -> Tensor:
        """Return what tokens bring to the gates. Shapes: [..., D] -> [..., 3 * H]."""
        return F.linear(embeddings.to(self.weight_ih_l0.dtype), self.weight_ih_l0)

    def step(self, projected: Tensor, state: Tensor) -> Tensor:
        """Take one token. Shapes: [K, 3 * H], [K, H] -> [K, H]."""
        of_reset, of_update, of_new = projected.chunk(_GATES, -1)
        recurrent = F.linear(state, self.weight_hh_l0).chunk(_GATES, -1)
        reset = torch.sigmoid(of_reset + recurrent[0])
        update = torch.sigmoid(of_update + recurrent[1])
        new = torch.tanh(of_new + reset * recurrent[2])
        return new + update * (state - new)

    def states(self, embeddings: Tensor) -> Tensor:
        """Return the state after each token of each block. Shapes: [K, T, D] -> [K, T, H]."""
        state, found = self.first_state(len(embeddings)), []
        for projected in self.project(embeddings).unbind(1):
            state = self.step(projected, state)
            found.append(state)
        return torch.stack(found, 1)


class Correction(nn.Sequential, Extra):
    """Hidden state and GRU state to logits, through ``emb_dim`` numbers."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )

    def reset(self, generator: torch.Generator) -> None:
        """Draw both matrices; behind a last one of zeros nothing else would learn."""
        for weight in self.parameters():
            weight.normal_(0.0, _INIT_STD, generator=generator)

    def code(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Return the numbers between the matrices. Shapes: [M, D], [M, H] -> [M, emb_dim]."""
        code: Tensor = self[1](self[0](torch.cat((hidden, state), -1)))
        return code

    @property
    def out(self) -> Tensor:
        """The last matrix. Shapes: [V, emb_dim]."""
        return cast(nn.Linear, self[2]).weight


class Domino(Variant):
    """A GRU and a correction behind the head."""

    name = "domino"
    architecture = "DFlashDraftModel"  # SGLang knows it by projector_type alone

    def faults(self, config: DraftConfig) -> list[str]:
        """Return what of the configuration does not fit."""
        size = config.block_size
        return (
            [] if size > FIRST_CORRECTED else [f"block_size {size}: domino corrects none below 3"]
        )

    def modules(self, config: DraftConfig) -> dict[str, nn.Module]:
        """Return GRU and correction."""
        return {"prefix_gru": PrefixGru(config), "embed_proj": Correction(config)}

    def tensor_shapes(self, config: DraftConfig) -> dict[str, tuple[int, ...]]:
        """Return the four matrices."""
        hidden, state, code = config.hidden_size, config.gru_hidden_dim, config.emb_dim
        return {
            "prefix_gru.weight_ih_l0": (_GATES * state, hidden),
            "prefix_gru.weight_hh_l0": (_GATES * state, state),
            "embed_proj.0.weight": (code, hidden + state),
            "embed_proj.2.weight": (config.vocab_size, code),
        }

    def method_keys(self, config: DraftConfig) -> dict[str, Any]:
        """Return what engines read of it: slot k predicts its own position, slot 1 by itself."""
        return _PUBLISHED | {"gru_hidden_dim": config.gru_hidden_dim, "emb_dim": config.emb_dim}

    def owns(self, architectures: Sequence[str], method: Mapping[str, Any]) -> bool:
        """The published ones bear a name of their own, which engines do not know."""
        return method.get("projector_type") == "domino" or "DominoDraftModel" in architectures

    def settings(self, method: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the keys. Raises: ValueError for another order of slots."""
        for key, known in _PUBLISHED.items():
            if method[key] != known:
                raise ValueError(f"{key} {method[key]!r}: only {known!r} is known")
        return {name: method[name] for name in ("gru_hidden_dim", "emb_dim")}

    @torch.no_grad()
    def choose(self, draft: nn.Module, head: FrozenHead, hidden: Tensor, first: Tensor) -> Tensor:
        """Draft slot by slot; each token moves the state that corrects the next slot."""
        gru, correction = _parts(draft)
        num_slots = hidden.shape[1] - 1
        chosen = []
        for part in HeadPass(max(1, HEAD_CHUNK_ROWS // num_slots)).chunks(len(hidden)):
            own, token = hidden[part], first[part]
            base, state, tokens = own[:, 1:] @ head.lm_head.t(), gru.first_state(len(own)), []
            for slot in range(1, num_slots + 1):
                state = gru.step(gru.project(F.embedding(token, head.embedding)), state)
                logits = base[:, slot - 1]
                if slot >= FIRST_CORRECTED:
                    code = correction.code(own[:, slot], state)
                    logits = logits + code @ correction.out.t()
                token = logits.argmax(-1)
                tokens.append(token)
            chosen.append(torch.stack(tokens, 1))
        return torch.cat(chosen)

    def loss(
        self,
        draft: nn.Module,
        rows: BlockRows,
        head: HeadRows,
        how: HeadPass,
        config: LossConfig,
        progress: float,
    ) -> BlockLoss:
        """(1 - share) CE(corrected) + share CE(base); the share falls from 1 to 0 in the run."""
        gru, correction = _parts(draft)
        share = base_share(progress, config.base_decay_frac)
        states = gru.states(F.embedding(rows.tokens[:, :-1], head.embedding))
        corrected = rows.take(rows.slots) >= FIRST_CORRECTED
        code = correction.code(rows.hidden, rows.take(states)) * corrected[:, None]
        out = correction.out if head.ids is None else correction.out[head.ids]
        apply: Any = _CorrectedLoss.apply  # torch gives it no types
        total, base_sum, hit, weights = apply(
            rows.hidden, code, out, (head.table, rows.labels, rows.weights), (share, how)
        )
        figures = {"lambda_base": total.new_tensor([share, 1.0]).double()}
        if share > 0:
            figures["base_loss"] = torch.stack((base_sum, weights.sum())).double()
        return BlockLoss(total, weights.sum(), hit, figures)


def base_share(progress: float, decay_frac: float) -> float:
    """Return the weight of the uncorrected logits: 1 at the start, 0 from ``decay_frac`` on."""
    return max(0.0, 1.0 - progress / decay_frac)


class _CorrectedLoss(torch.autograd.Function):
    """Makes all gradients in the forward, chunk by chunk, as model.head does.

    Shapes: x [M, D], code [M, E], out [V, E], (head [V, D], labels [M], weights [M]).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        code: Tensor,
        out: Tensor,
        given: tuple[Tensor, Tensor, Tensor],
        plan: tuple[float, HeadPass],
    ) -> tuple[Tensor, ...]:
        """Return the loss, the base's weighted entropy, the hits and the weights."""
        head, labels, weights = given
        share, how = plan
        as_given = replace(how, weigh=None)  # the base is weighed as the corrected logits are
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        base_sum = torch.zeros_like(total)
        of_x, of_code = torch.empty_like(x), torch.empty_like(code)
        of_out = torch.zeros_like(out, dtype=torch.float32)
        hit, used = torch.empty_like(labels, dtype=torch.bool), torch.empty_like(weights)
        parts = how.chunks(len(x))
        products, memory = Products(x, head, parts, how.fp8), logits_memory(parts, len(head), x)
        for part in parts:
            base = products.logits(part)
            logits = torch.addmm(base, code[part], out.t(), out=memory[: len(base)])
            made = chunk_loss(logits, labels[part], weights[part], how, 1 - share)
            hit[part], used[part] = made.hit, made.weights
            total += (1 - share) * (made.entropy * made.weights).sum()
            torch.mm(made.steep, head, out=of_x[part])
            torch.mm(made.steep, out, out=of_code[part])
            of_out += made.steep.t() @ code[part]
            if share > 0:
                made = chunk_loss(base, labels[part], used[part], as_given, share)
                base_sum += (made.entropy * made.weights).sum()
                of_x[part] += made.steep @ head
        ctx.save_for_backward(of_x, of_code, of_out.to(out.dtype))
        ctx.mark_non_differentiable(base_sum, hit, used)
        return total + share * base_sum, base_sum, hit, used

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients."""
        of_x, of_code, of_out = (made * upstream[0].to(made.dtype) for made in ctx.saved_tensors)
        return of_x, of_code, of_out, None, None


def _parts(draft: nn.Module) -> tuple[PrefixGru, Correction]:
    return (
        cast(PrefixGru, draft.get_submodule("prefix_gru")),
        cast(Correction, draft.get_submodule("embed_proj")),
    )
