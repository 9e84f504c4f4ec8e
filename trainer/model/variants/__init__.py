"""The kinds of draft by the name that draft.variant gives them; a new one is entered here."""

from collections.abc import Mapping
from typing import Any

from trainer.model.variants.dflash import DFlash
from trainer.model.variants.dflash2 import DFlash2
from trainer.model.variants.domino import Domino
from trainer.model.variants.variant import Variant

VARIANTS: dict[str, Variant] = {
    variant.name: variant for variant in (DFlash(), DFlash2(), Domino())
}


def variant_of(raw: Mapping[str, Any]) -> Variant:
    """Return the kind that a config.json describes; plain DFlash when no other claims it."""
    architectures, method = raw.get("architectures") or (), raw["dflash_config"]
    plain = VARIANTS["dflash"]
    others = (v for v in VARIANTS.values() if v is not plain and v.owns(architectures, method))
    return next(others, plain)
