"""The layers of a known target over one flat row of documents, compiled around their kernels.

A forward takes T tokens, T one of a few declared sizes: documents one after another, and what is
left over as one more document. Everything but attention and the delta rule treats each token by
itself, so a graph depends on T alone and is shared by all layers of a kind: two graphs a kind and
a size, all of them compiled before training. Documents keep apart by construction: attention and
the delta rule are told where they begin, and the convolution reads no token before them.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.compile_gate import CompileGate
from trainer.errors import TargetError
from trainer.model import packed_attention, recurrent_kernels, row_scaled, target_layers
from trainer.model.target_layers import (
    AttentionSizes,
    AttentionWeights,
    DeltaSizes,
    DeltaWeights,
    MixedWeights,
    Norm,
    Rotation,
    Weight,
)

_DECODERS = ("LlamaModel", "Qwen3Model", "Qwen3_5TextModel")
_LAYERS = ("LlamaDecoderLayer", "Qwen3DecoderLayer", "Qwen3_5DecoderLayer")
_SIZE_STEP = 128  # tokens; kernels of products like whole tiles
_NUM_SIZES = 4  # the longest, its half, quarter and eighth
# What one more forward costs, in tokens: shorter ones fill the card less.
_FORWARD_COST_TOKENS = 256
_kernel_lock = threading.Lock()  # fla keeps its indices in a list that two threads may not share


@dataclass(frozen=True)
class Layout:
    """Documents in a row of T tokens, one after another, the last one perhaps of padding.

    Shapes: boundaries [documents + 1] int32 and position [T] int32, on the device.
    """

    lengths: tuple[int, ...]
    boundaries: Tensor
    position: Tensor

    @property
    def num_rows(self) -> int:
        """Documents of equal length are rows of a rectangle; else 0."""
        return len(self.lengths) if len(set(self.lengths)) == 1 else 0


class CompiledTarget:
    """``features`` of documents by compiled layers; several threads may use one instance.

    ``forward_tokens``: the longest forward; ``sizes`` are the lengths that are ever compiled.
    ``fp8``: products of the layers in FP8; the model keeps its own weights beside them.

    Raises: TargetError when the layers are none of the known ones.
    """

    def __init__(
        self,
        decoder: Any,
        tap_ids: Sequence[int],
        gate: CompileGate,
        *,
        forward_tokens: int,
        fp8: bool = False,
    ) -> None:
        reason = why_unknown(decoder, tap_ids)
        if reason:
            raise TargetError(f"the target cannot be compiled: {reason}")
        self._decoder, self._tap_ids = decoder, tuple(tap_ids)
        self.sizes = forward_sizes(forward_tokens)
        weigh: Callable[[Tensor], Weight] = row_scaled.quantise if fp8 else _same
        kinds = _Kinds(gate, weigh)
        self.layers = [kinds.layer(layer) for layer in decoder.layers[: self._tap_ids[-1] + 1]]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        found: torch.device = self._decoder.embed_tokens.weight.device
        return found

    @torch.no_grad()
    def features(self, documents: Sequence[Tensor]) -> list[Tensor]:
        """Return the taps of every document. Shapes: [length] ids each -> [length, n * D] each.

        Raises: TargetError for a document longer than the longest size.
        """
        lengths = [len(document) for document in documents]
        found: dict[int, Tensor] = {}
        for size, group in fill(lengths, self.sizes):
            taps = self.forward([documents[i] for i in group], size)
            begin = 0
            for i in group:
                found[i] = torch.cat([tap[begin : begin + lengths[i]] for tap in taps], -1)
                begin += lengths[i]
        return [found[i] for i in range(len(documents))]

    @torch.no_grad()
    def forward(self, documents: Sequence[Tensor], size: int) -> list[Tensor]:
        """Run the layers over ``size`` tokens. Shapes: [length] ids each -> n taps [size, D]."""
        ids, layout = self._lay_out(documents, size)
        hidden = self._decoder.embed_tokens(ids)
        made = torch.zeros_like(hidden)
        rotation = self._rotation(hidden, layout.position)
        taps = {}
        for number, layer in enumerate(self.layers):
            read, hidden, made = layer(hidden, made, rotation, layout)
            if number - 1 in self._tap_ids:
                taps[number - 1] = read
        taps[self._tap_ids[-1]] = hidden + made
        return [taps[number] for number in self._tap_ids]

    def _rotation(self, hidden: Tensor, position: Tensor) -> Rotation:
        """Return the rotary embedding of the model itself, as ``rotate`` wants it."""
        places = position[None].long()
        if type(self._decoder).__name__ == "Qwen3_5TextModel":  # time, height and width
            places = places[None].expand(3, 1, -1)
        cos, sin = self._decoder.rotary_emb(hidden[None], places)
        first, second = sin[0].chunk(2, -1)
        return Rotation(cos[0].contiguous(), torch.cat([-first, second], -1))

    def _lay_out(self, documents: Sequence[Tensor], size: int) -> tuple[Tensor, Layout]:
        lengths = [len(document) for document in documents]
        left = size - sum(lengths)
        pieces = [document.cpu().long() for document in documents]
        if left:
            lengths.append(left)
            pieces.append(torch.zeros(left, dtype=torch.long))
        ends = packed_attention.boundaries_of(lengths)
        position = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
        put = self._put
        return put(torch.cat(pieces)), Layout(tuple(lengths), put(ends), put(position))

    def _put(self, values: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)


@dataclass(frozen=True)
class AttentionLayer:
    """One layer of full attention; ``before`` and ``after`` are compiled."""

    before: Callable[..., target_layers.AttentionInputs]
    after: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[AttentionWeights, MixedWeights]
    scale: float

    def __call__(
        self, hidden: Tensor, made: Tensor, rotation: Rotation, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's input, and its output in two parts. Shapes: [T, D] each."""
        found = self.before(hidden, made, rotation, self.weights[0])
        mixed = attend(found.query, found.key, found.value, layout, self.scale)
        # A graph is made for one layout in memory; kernels that give another one are copied.
        parts = self.after(found.hidden, mixed.contiguous(), found.gate, self.weights[1])
        return found.hidden, *parts


@dataclass(frozen=True)
class DeltaLayer:
    """One layer of the gated delta rule; ``before`` and ``after`` are compiled, ``rule`` is not.

    convolve: mixed, position, kernel -> heads; a kernel of its own or compiled.
    """

    before: Callable[..., target_layers.DeltaInputs]
    after: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[DeltaWeights, MixedWeights]
    convolve: Callable[[Tensor, Tensor, Tensor], target_layers.DeltaHeads]
    rule: Callable[..., Any]

    def __call__(
        self,
        hidden: Tensor,
        made: Tensor,
        rotation: Rotation,  # noqa: ARG002 - of layers of attention
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the layer's input, and its output in two parts. Shapes: [T, D] each."""
        found = self.before(hidden, made, self.weights[0])
        heads = self.convolve(found.mixed, layout.position, self.weights[0].convolution)
        mixed = self._mix([*heads, found.decay, found.beta], layout).contiguous()
        return found.hidden, *self.after(found.hidden, mixed, found.gate, self.weights[1])

    def _mix(self, inputs: list[Tensor], layout: Layout) -> Tensor:
        """Run the delta rule from an empty state in each document. Shapes: -> [T, V, e]."""
        if layout.num_rows:
            rows = [_as_rows(x, layout.num_rows) for x in inputs]
            return self._run(rows).flatten(0, 1)
        if recurrent_kernels.is_fallback(self.rule):
            pieces = zip(*(torch.split(x, list(layout.lengths)) for x in inputs), strict=True)
            return torch.cat([self._run([x[None] for x in piece])[0] for piece in pieces])
        with _kernel_lock:
            return self._run([x[None] for x in inputs], cu_seqlens=layout.boundaries)[0]

    def _run(self, inputs: list[Tensor], **boundaries: Tensor) -> Tensor:
        query, key, value, decay, beta = inputs
        times = value.shape[2] // key.shape[2]
        if times > 1 and recurrent_kernels.is_fallback(self.rule):  # older ones want equal numbers
            query, key = (x.repeat_interleave(times, 2) for x in (query, key))
        out: Tensor = self.rule(query, key, value, g=decay, beta=beta, **boundaries)[0]
        return out


class _Kinds:
    """Makes the layers; those of one kind share their two compiled functions."""

    def __init__(self, gate: CompileGate, weigh: Callable[[Tensor], Weight]) -> None:
        self._gate, self._weigh = gate, weigh
        self._made: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._convolutions: dict[DeltaSizes, Callable[..., target_layers.DeltaHeads]] = {}

    def layer(self, layer: Any) -> AttentionLayer | DeltaLayer:
        if hasattr(layer, "linear_attn"):
            return self._delta(layer, layer.linear_attn)
        return self._attention(layer, layer.self_attn)

    def _attention(self, layer: Any, part: Any) -> AttentionLayer:
        config = part.config
        gated = part.q_proj.out_features == 2 * part.o_proj.in_features
        sizes = AttentionSizes(
            config.num_attention_heads,
            config.num_key_value_heads,
            part.head_dim,
            gated,
            _norm(layer.input_layernorm),
        )
        before, after = self._pair(
            sizes, target_layers.before_attention, target_layers.after_attention
        )
        normed = hasattr(part, "q_norm")
        weights = AttentionWeights(
            layer.input_layernorm.weight.detach(),
            self._weigh(_joined([part.q_proj, part.k_proj, part.v_proj])),
            part.q_norm.weight.detach() if normed else None,
            part.k_norm.weight.detach() if normed else None,
        )
        return AttentionLayer(
            before, after, (weights, self._mixed(layer, part.o_proj, None)), part.scaling
        )

    def _delta(self, layer: Any, part: Any) -> DeltaLayer:
        sizes = DeltaSizes(
            part.num_k_heads,
            part.num_v_heads,
            part.head_k_dim,
            part.head_v_dim,
            _norm(layer.input_layernorm),
            _norm(part.norm),
        )
        before, after = self._pair(
            sizes, target_layers.before_delta_rule, target_layers.after_delta_rule
        )
        wide, narrow = [part.in_proj_qkv, part.in_proj_z], [part.in_proj_b, part.in_proj_a]
        own = self._weigh is not _same  # the gates stay exact: their error grows with every token
        weights = DeltaWeights(
            layer.input_layernorm.weight.detach(),
            self._weigh(_joined(wide if own else [*wide, *narrow])),
            _joined(narrow) if own else None,
            part.conv1d.weight.detach()[:, 0],
            part.A_log.detach(),
            part.dt_bias.detach(),
        )
        rule = recurrent_kernels.kernel_of(part, recurrent_kernels.DELTA_RULE)
        assert rule is not None  # noqa: S101 - why_unknown has looked
        mixed = self._mixed(layer, part.out_proj, part.norm)
        convolve = self._convolution(sizes, part.conv1d.weight.device)
        return DeltaLayer(before, after, (weights, mixed), convolve, rule)

    def _convolution(
        self, sizes: DeltaSizes, device: torch.device
    ) -> Callable[..., target_layers.DeltaHeads]:
        if sizes not in self._convolutions:
            made = _convolution_kernel(sizes) if device.type == "cuda" else None
            plain = target_layers.convolve_heads(sizes)
            self._convolutions[sizes] = made or self._gate.wrap(plain)
        return self._convolutions[sizes]

    def _mixed(self, layer: Any, output: Any, mixed_norm: Any) -> MixedWeights:
        return MixedWeights(
            None if mixed_norm is None else mixed_norm.weight.detach(),
            self._weigh(output.weight.detach()),
            layer.post_attention_layernorm.weight.detach(),
            self._weigh(_joined([layer.mlp.gate_proj, layer.mlp.up_proj])),
            self._weigh(layer.mlp.down_proj.weight.detach()),
        )

    def _pair(
        self, sizes: Any, before: Callable[..., Any], after: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        if sizes not in self._made:
            self._made[sizes] = (self._gate.wrap(before(sizes)), self._gate.wrap(after(sizes)))
        return self._made[sizes]


def why_unknown(decoder: Any, tap_ids: Sequence[int]) -> str:
    """Return why the layers of a decoder cannot be compiled here, or an empty text."""
    name = type(decoder).__name__
    if name not in _DECODERS or not _is_transformers(decoder):
        return f"{name} is none of {', '.join(_DECODERS)}"
    for number, layer in enumerate(decoder.layers[: tap_ids[-1] + 1]):
        reason = _why_unknown_layer(layer)
        if reason:
            return f"layer {number}: {reason}"
    return ""


def _why_unknown_layer(layer: Any) -> str:
    if type(layer).__name__ not in _LAYERS or not _is_transformers(layer):
        return f"{type(layer).__name__} is none of {', '.join(_LAYERS)}"
    linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    delta = getattr(layer, "linear_attn", None)
    attention = getattr(layer, "self_attn", None)
    kinds = {type(part).__name__ for part in layer.modules()}
    rules = [
        (any(part.bias is not None for part in linears), "a product with a bias"),
        (any(type(part) is not nn.Linear for part in linears), "adapted or quantised products"),
        (not kinds & {"SiLU", "SiLUActivation"}, "an activation that is not SiLU"),
        (getattr(attention, "sliding_window", None) is not None, "windowed attention"),
        (delta is not None and delta.conv1d.bias is not None, "a convolution with a bias"),
        (delta is not None and delta.activation != "silu", "an activation that is not SiLU"),
        (
            delta is not None
            and recurrent_kernels.kernel_of(delta, recurrent_kernels.DELTA_RULE) is None,
            "no delta rule",
        ),
    ]
    return next((f"it has {what}" for found, what in rules if found), "")


def _is_transformers(part: Any) -> bool:
    return type(part).__module__.startswith("transformers.models.")


def forward_sizes(forward_tokens: int) -> tuple[int, ...]:
    """Return the lengths of a forward, ascending: the longest, its half, quarter and eighth."""
    longest = _rounded(forward_tokens)
    return tuple(sorted({_rounded(-(-longest // 2**power)) for power in range(_NUM_SIZES)}))


def _rounded(tokens: int) -> int:
    return -(-tokens // _SIZE_STEP) * _SIZE_STEP


def fill(lengths: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Lay documents into forwards of the given sizes: (size, indices) each, long ones first.

    Of all sizes each time the one that costs least for each token it takes is chosen.

    Raises: TargetError for a document longer than the last size.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while left:
        longest = lengths[left[0]]
        tries = [(size, _fitting(left, lengths, size)) for size in sizes if size >= longest]
        if not tries:
            raise TargetError(f"a document of {longest} tokens; a forward takes {sizes[-1]}")

        def cost(found: tuple[int, list[int]]) -> tuple[float, int]:
            used = sum(lengths[i] for i in found[1])
            return (found[0] + _FORWARD_COST_TOKENS) / max(used, 1), -found[0]

        size, group = min(tries, key=cost)
        taken = set(group)
        left = [i for i in left if i not in taken]
        yield size, group


def _fitting(order: Sequence[int], lengths: Sequence[int], size: int) -> list[int]:
    found = []
    for i in order:
        if lengths[i] <= size:
            found.append(i)
            size -= lengths[i]
    return found


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Causal attention within each document. Shapes: [T, H, d], [T, G, d] twice -> [T, H, d].

    Rows of equal length go through SDPA, others through the kernel that knows boundaries.
    """
    if layout.num_rows:
        rows = [_as_rows(x, layout.num_rows) for x in (query, key, value)]
        return _attend_rows(rows, scale).flatten(0, 1)
    if packed_attention.takes_boundaries(query, key, value):
        heads, longest = (query, key, value), max(layout.lengths)
        return packed_attention.attend_within(heads, layout.boundaries, longest, scale)
    lengths = list(layout.lengths)
    pieces = zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True)
    return torch.cat([_attend_rows([x[None] for x in piece], scale)[0] for piece in pieces])


def _as_rows(x: Tensor, num_rows: int) -> Tensor:
    """Shapes: [T, ...] -> [R, T / R, ...]."""
    return x.view(num_rows, -1, *x.shape[1:])


def _attend_rows(rows: Sequence[Tensor], scale: float) -> Tensor:
    """Shapes: [R, S, H, d], [R, S, G, d] twice -> [R, S, H, d]."""
    query, key, value = (x.transpose(1, 2) for x in rows)
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _convolution_kernel(sizes: DeltaSizes) -> Callable[..., target_layers.DeltaHeads] | None:
    from trainer.model import delta_kernels  # noqa: PLC0415 - Triton is there for CUDA alone

    if not delta_kernels.fits(sizes):
        return None
    return functools.partial(delta_kernels.convolve_heads, sizes=sizes)


def _norm(part: Any) -> Norm:
    if hasattr(part, "variance_epsilon"):
        return Norm(float(part.variance_epsilon))
    return Norm(float(part.eps), centred=True)


def _same(weight: Tensor) -> Weight:
    return weight


def _joined(parts: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of several products of one input as one; theirs become views of it."""
    whole = torch.cat([part.weight.detach() for part in parts])
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.weight = nn.Parameter(whole[begin:end], requires_grad=False)
        begin = end
    return whole
