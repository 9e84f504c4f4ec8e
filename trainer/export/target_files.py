"""What converters and validators read of a target's directory; no model is built.

The embedding and the head are found by their names in the safetensors headers, as engines find
them; a tied head is the embedding.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from trainer.errors import TargetError
from trainer.export.files import TensorFiles, TensorInfo

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetFiles:
    """A target's directory, opened. text_config: the text part of config.json."""

    directory: Path
    config: Any
    text_config: Any
    tensors: TensorFiles

    @classmethod
    def open(cls, directory: str | Path) -> "TargetFiles":
        """Read config.json and the headers. Raises: TargetError naming what is missing."""
        path = Path(directory)
        if not (path / "config.json").is_file():
            raise TargetError(f"--target {path}: no config.json; name the target's directory")
        try:
            config = AutoConfig.from_pretrained(str(path))
            text_config = config.get_text_config()
        except Exception as error:  # its validation has error classes of its own, and others
            raise TargetError(
                f"--target {path}: config.json cannot be read: {error}; copy the model again, whole"
            ) from error
        return cls(path, config, text_config, TensorFiles(path))

    @property
    def architectures(self) -> list[str]:
        """Names of the model classes in config.json."""
        told = getattr(self.config, "architectures", None)
        return list(told) if isinstance(told, list) else []

    @property
    def num_layers(self) -> int:
        """Decoder layers of the text part."""
        return int(self.text_config.num_hidden_layers)

    @property
    def rope_theta(self) -> float | None:
        """Theta of full attention; None where the target has no rotary positions.

        Raises: TargetError for one that is no float.
        """
        held = getattr(self.text_config, "rope_parameters", None) or {}
        held = held.get("full_attention", held)
        theta = held.get("rope_theta", getattr(self.text_config, "rope_theta", None))
        try:
            return None if theta is None else float(theta)
        except OverflowError as error:
            text = f"--target {self.directory}: config.json: rope_theta {theta} is no number of use"
            raise TargetError(f"{text}; copy the model again, whole") from error

    @cached_property
    def embedding_name(self) -> str:
        """Name of the embedding. Raises: TargetError when none or several may be meant."""
        self._whole()
        found = [name for name in self.tensors.infos if name.endswith(_EMBEDDING)]
        if len(found) != 1:
            raise TargetError(
                f"--target {self.directory}: {len(found)} tensors end in {_EMBEDDING}"
                f" ({', '.join(found[:3]) or 'none'}), expected one; this target is not supported"
            )
        return found[0]

    @cached_property
    def head_name(self) -> str:
        """Name of the head; the embedding's where the two are tied.

        Raises: TargetError where there is none or several.
        """
        self._whole()
        flags = (self.text_config, self.config)  # a wrapper may say it for its text part
        if any(bool(getattr(held, "tie_word_embeddings", False)) for held in flags):
            return self.embedding_name
        found = [name for name in self.tensors.infos if name.endswith(_HEAD)]
        if len(found) != 1:
            raise TargetError(
                f"--target {self.directory}: {len(found)} tensors end in {_HEAD}, expected one, as"
                " tie_word_embeddings is false; copy the model again, whole"
            )
        return found[0]

    @property
    def embedding(self) -> TensorInfo:
        """Shape [rows, D], dtype and file of the embedding."""
        return self.tensors.infos[self.embedding_name]

    @property
    def head(self) -> TensorInfo:
        """Shape [rows, D], dtype and file of the head."""
        return self.tensors.infos[self.head_name]

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU."""
        return self.tensors.read(name)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises: TargetError when there is none."""
        try:
            return AutoTokenizer.from_pretrained(str(self.directory))
        except Exception as error:  # a damaged file gives errors of many classes
            text = f"--target {self.directory}: no tokenizer can be loaded: {error}"
            raise TargetError(text) from error

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Every token that may end an answer: of either configuration and of the tokenizer.

        Raises: TargetError for a generation_config.json that is not readable.
        """
        told: list[Any] = [getattr(self.text_config, "eos_token_id", None)]
        told.append(getattr(self.config, "eos_token_id", None))
        path = self.directory / "generation_config.json"
        if path.is_file():
            try:
                told.append(json.loads(path.read_text()).get("eos_token_id"))
            except (ValueError, AttributeError) as error:
                raise TargetError(f"{path}: not a generation configuration ({error})") from error
        told.append(self.tokenizer.eos_token_id)
        lists = [ids if isinstance(ids, list) else [ids] for ids in told]
        return frozenset(i for ids in lists for i in ids if isinstance(i, int))

    def _whole(self) -> None:
        if self.tensors.problems:
            told = "; ".join(str(problem) for problem in self.tensors.problems[:3])
            raise TargetError(f"--target {self.directory}: {told}; copy the model again, whole")
