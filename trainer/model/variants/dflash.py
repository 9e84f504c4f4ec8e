"""DFlash as published (arXiv 2602.06036)."""

from trainer.model.variants.variant import Variant


class DFlash(Variant):
    """Nothing beyond the base: every slot takes the token that the head likes best."""

    name = "dflash"
    architecture = "DFlashDraftModel"
