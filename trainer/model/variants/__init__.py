"""The kinds of draft by the name that draft.variant gives them; a new one is entered here."""

from trainer.model.variants.dflash import DFlash
from trainer.model.variants.variant import Variant

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in (DFlash(),)}
