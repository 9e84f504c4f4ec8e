"""Which Python a launch would use; a part of programs of this package."""

import json
from pathlib import Path
from typing import Any


def chosen_python(arguments: dict[str, Any]) -> str:
    """Return the interpreter of the release's environment, else that of hosts.yaml.

    arguments: "workspace", "requirements_digest", and "python", that of hosts.yaml.
    """
    index = Path(arguments["workspace"], "envs", f"{arguments['requirements_digest']}.json")
    try:
        return str(json.loads(index.read_text())["python"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(arguments["python"])
