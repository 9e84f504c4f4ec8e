"""Asks the driver of a machine about its GPUs, and keeps the locks that launches take on them.

argv[1]: {"action": look, claim, bind, release, list or clear, "wanted", "claim", "run", "select",
"force", "inside": {vmid: argv}, "directory", "limit_s"}; each action says what it reads. Prints one
JSON object. Runs on the node, which sees every process, else in the container.
"""

import json
import shutil
import sys
from typing import Any

from dflashctl.remote.driver import SMI_S, Driver, look
from dflashctl.remote.gpu_locks import Locks, lock_directory
from dflashctl.remote.processes import is_confined

Json = dict[str, Any]


def uuids_of(wanted: list[str], rows: Json) -> list[str] | None:
    """Return the UUIDs of indexes and UUIDs, each once, sorted; None when one is not there."""
    by_index = {}
    for row in rows["rows"]:
        words = [word.strip() for word in row.split(",")]
        by_index[words[0]] = words[1]
    there = set(by_index.values())
    uuids = {by_index.get(one, one) for one in wanted}
    return sorted(uuids) if uuids <= there else None


def claim(locks: Locks, driver: Driver, arguments: Json) -> Json:
    """Lock the ``wanted`` GPUs, all or none, and look at the cards inside the locks.

    A machine without nvidia-smi locks UUIDs unseen; its container is asked about them.
    """
    wanted = arguments["wanted"]
    named = all(one.startswith(("GPU-", "MIG-")) for one in wanted)
    uuids: list[str] | None = sorted(set(wanted)) if named else None
    if shutil.which("nvidia-smi"):
        uuids = uuids_of(wanted, driver.rows())
    if uuids is None:  # the look says which is not there
        return {"claim": None} | look(driver, arguments.get("inside", {}))
    with locks.guarded():
        taken = locks.claim(uuids, arguments["claim"])
    seen = {"uuids": uuids, "confined": is_confined()}
    return {"claim": taken | seen} | look(driver, arguments.get("inside", {}))


def main(arguments: Json) -> Json:
    """Do what is asked."""
    action = arguments["action"]
    locks = Locks(lock_directory(arguments.get("directory"), make=action == "claim"))
    driver = Driver(locks.directory, arguments.get("limit_s", SMI_S))
    answer: Json = {}
    if action == "claim":
        answer = claim(locks, driver, arguments)
    elif action == "bind":
        with locks.guarded():
            answer = {"pid": locks.bind(arguments["run"]["token"])}
    elif action == "release":
        with locks.guarded():
            answer = locks.release(arguments["run"])
    elif action == "clear":
        with locks.guarded():
            answer = locks.clear(arguments["select"], force=arguments["force"])
    if action == "look" or arguments.get("look"):
        answer |= look(driver, arguments.get("inside", {}))
    return answer | {"locks": locks.listed()}


if __name__ == "__main__":
    try:
        print(json.dumps(main(json.loads(sys.argv[1]))))
    except OSError as problem:
        hint = "as root on that machine: install -d -m 1777 /run/lock/dflashctl"
        text = f"the locks of the GPUs cannot be kept: {problem}"
        error = {"kind": "failed", "code": "locks", "message": text, "hint": hint}
        print(json.dumps({"error": error}))
        sys.exit(1)
