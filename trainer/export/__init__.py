"""A trained draft as directories that serving engines load, their check and their model card."""

from trainer.export.files import CONFIG
from trainer.export.zlab import export_draft, load_export, tensor_shapes

__all__ = ["CONFIG", "export_draft", "load_export", "tensor_shapes"]
