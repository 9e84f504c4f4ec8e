"""DFlash trainer: the package that runs inside the container.

Importing it costs nothing: torch and transformers are imported by the modules that use them.
"""

__version__ = "0.1.0"
