"""Programs sent to a container or node: standard library only, JSON in argv[1].

They run as ``python3 -I -S -c TEXT JSON``. Where one imports a module of this package, as
``from dflashctl.remote.NAME import ...``, the text brings that module along; nothing else of this
project is there. The container's own python3 runs them: Python 3.10 (Ubuntu 22.04) must do.
"""

import re
from pathlib import Path

_IMPORT = re.compile(rf"^from {re.escape(__name__)}\.(\w+) import ", re.MULTILINE)
_PROVIDE = """\
import sys, types
def _provide(name, text):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""


def program(name: str) -> str:
    """Return ``dflashctl/remote/NAME.py`` as one text, from a checkout or an installed wheel."""
    modules: dict[str, str] = {}
    text = _read(name, modules)
    if not modules:
        return text
    brought = [f"_provide({__name__ + '.' + key!r}, {told!r})\n" for key, told in modules.items()]
    return "".join([_PROVIDE, *brought, text])


def _read(name: str, modules: dict[str, str]) -> str:
    """Return the text of a file; what it imports comes to ``modules``, each after its own needs."""
    # importlib.resources would read it from a zip as well, for 10 ms more
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for needed in _IMPORT.findall(text):
        if needed not in modules:
            modules[needed] = _read(needed, modules)
    return text
