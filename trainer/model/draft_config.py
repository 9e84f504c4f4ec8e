"""The draft's shape: everything that fixes the network and its meaning."""

from dataclasses import asdict, dataclass
from typing import Any

from trainer.contract.config import DraftModelConfig
from trainer.errors import TargetError
from trainer.model.masks import FULL, SLIDING, MaskRule, rule_of
from trainer.model.target import default_target_layer_ids

# Settings that mean the same in the training configuration and here.
_TAKEN_OVER = (
    "num_draft_layers",
    "block_size",
    "mask_token_id",
    "sliding_window",
    "causal",
    "sliding_window_non_causal",
    "normalise_taps",
    "dtype",
    "variant",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "gru_hidden_dim",
    "emb_dim",
)


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes the network's shape and meaning; all of it goes into config.json."""

    hidden_size: int
    intermediate_size: int
    num_draft_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    causal: bool = False
    sliding_window_non_causal: bool = False
    normalise_taps: bool = False
    tied_target: bool = False
    dtype: str = "bfloat16"
    variant: str = "dflash"
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    gru_hidden_dim: int = 1024
    emb_dim: int = 256

    @classmethod
    def from_target(
        cls, text_config: Any, config: DraftModelConfig, num_target_layers: int
    ) -> "DraftConfig":
        """Fill what ``config`` leaves open from the target's text configuration.

        Raises: TargetError for ids, a mask token or heads that do not fit the target.
        """
        hidden = int(_told(text_config, "hidden_size"))
        own_heads = int(_told(text_config, "num_attention_heads"))
        own_head_dim = getattr(text_config, "head_dim", None) or hidden // own_heads
        own_kv_heads = getattr(text_config, "num_key_value_heads", None) or own_heads
        ids = config.target_layer_ids
        draft = cls(
            hidden_size=hidden,
            intermediate_size=config.intermediate_size
            or int(_told(text_config, "intermediate_size")),
            num_attention_heads=config.num_attention_heads or own_heads,
            num_key_value_heads=config.num_key_value_heads or own_kv_heads,
            head_dim=config.head_dim or own_head_dim,
            rms_norm_eps=float(_told(text_config, "rms_norm_eps")),
            rope_theta=_rope_theta(text_config),
            max_position_embeddings=int(_told(text_config, "max_position_embeddings")),
            vocab_size=int(_told(text_config, "vocab_size")),
            target_layer_ids=ids or default_target_layer_ids(num_target_layers, config.num_taps),
            num_target_layers=num_target_layers,
            layer_types=config.layer_types or (FULL,) * config.num_draft_layers,
            tied_target=bool(getattr(text_config, "tie_word_embeddings", False)),
            **{name: getattr(config, name) for name in _TAKEN_OVER},
        )
        draft.check()
        return draft

    def check(self) -> None:
        """Raise TargetError, naming the setting, when the parts do not fit together."""
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        kinds, layers = self.layer_types, self.num_draft_layers
        ascending = bool(ids) and ids == tuple(sorted(set(ids)))
        rules = [
            (
                ascending and ids[0] >= 0 and ids[-1] <= last,
                f"target_layer_ids {list(ids)}: expected ascending layers of 0..{last}",
            ),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id}: embedding rows are 0..{self.vocab_size - 1}",
            ),
            (
                heads % kv_heads == 0,
                f"num_attention_heads {heads}: not a multiple of num_key_value_heads {kv_heads}",
            ),
            (
                self.head_dim % 2 == 0,
                f"head_dim {self.head_dim}: rotary positions need an even one",
            ),
            (
                len(kinds) == layers and set(kinds) <= {FULL, SLIDING},
                f"layer_types {list(kinds)}: expected {layers} times {FULL} or {SLIDING}",
            ),
            (
                SLIDING not in kinds or bool(self.sliding_window),
                "sliding_window: needed by a sliding_attention layer",
            ),
        ]
        for good, text in rules:
            if not good:
                raise TargetError(f"draft.{text}; change it in the training configuration")

    @property
    def num_taps(self) -> int:
        """How many target layers are fused."""
        return len(self.target_layer_ids)

    @property
    def rules(self) -> dict[str, MaskRule]:
        """Mask rule of each layer type that occurs."""
        return {kind: self.rule(kind) for kind in dict.fromkeys(self.layer_types)}

    def rule(self, layer_type: str) -> MaskRule:
        """Return how layers of this type see."""
        window, loose = self.sliding_window, self.sliding_window_non_causal
        return rule_of(
            layer_type, self.block_size, window, causal=self.causal, sliding_non_causal=loose
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _told(text_config: Any, name: str) -> Any:
    value = getattr(text_config, name, None)
    if value is None:
        raise TargetError(
            f"the target's text configuration has no {name}; set draft.{name} if there is such a"
            " setting, else this kind of target is not supported"
        )
    return value


def _rope_theta(text_config: Any) -> float:
    """Return theta; transformers 5 keeps it in rope_parameters, some models one a layer type."""
    held: Any = getattr(text_config, "rope_parameters", None) or {}
    if FULL in held:
        held = held[FULL]
    theta = held.get("rope_theta", getattr(text_config, "rope_theta", None))
    if theta is None:
        raise TargetError("the target's text configuration has no rope_theta")
    return float(theta)
