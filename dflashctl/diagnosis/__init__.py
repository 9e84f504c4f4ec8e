"""What `doctor` makes of the facts about laptop, node and container: checks, each with its fix.

Pure but for ``laptop``: facts as ``remote/node_facts.py`` and ``remote/container_facts.py`` print
them go in, checks come out, in the order in which a launch would meet them.
"""

from dflashctl.diagnosis.check import FAIL, OK, SKIPPED, WARN, Check, Checks

__all__ = ["FAIL", "OK", "SKIPPED", "WARN", "Check", "Checks"]
