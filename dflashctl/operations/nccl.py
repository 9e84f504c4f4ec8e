"""doctor --nccl: can two GPUs of a place add numbers with each other, in time and exactly.

Two ranks run over the first two idle GPUs of its roles, which are locked meanwhile; where the roles
are ``cpu``, over gloo.
"""

import json
from collections.abc import Sequence
from typing import Any

from dflashctl.diagnosis import FAIL, SKIPPED, Check, Checks
from dflashctl.diagnosis.all_reduce import NAME, judge_all_reduce
from dflashctl.errors import DflashctlError, RefusedError
from dflashctl.gpu_locks import Holder, new_token
from dflashctl.gpu_roles import Ways, claim_idle, uses_gpus
from dflashctl.inventory import Place
from dflashctl.program import Program, run_program
from trainer.contract.layout import Workspace

_TAG = "nccl"
_NUM_GPUS = 2
_COUNTS = (1, 1025, 1 << 20)  # numbers of 4 bytes; 1025: no multiple of what a kernel takes at once
_GPU_COUNTS = (*_COUNTS, 1 << 26)  # 256 MiB, where the bus is busy
# The first all_reduce makes NCCL's channels. All together less than the lease of a lock.
_LIMITS_S = {
    "start": 30.0,
    "import": 120.0,
    "join": 60.0,
    "all_reduce": 45.0,
    "timing": 45.0,
    "leave": 30.0,
}
_PROGRAM_S = 570.0
_NEEDED = ("reach", "python", "torch", "device nodes", "CUDA")


def obstacle(place: Place, checks: Sequence[Check]) -> Check | None:
    """Return the check that says why the ranks cannot run, by what ``doctor`` found before."""
    here = [check for check in checks if check.place == place.label and check.name in _NEEDED]
    for check in here:
        if check.status == FAIL or (check.name, check.status) == ("reach", SKIPPED):
            return _skipped(place, f"see `{check.name}`")
    container = place.container
    cards = dict.fromkeys((*container.target, *container.drafter))
    if uses_gpus(container) and len(cards) < _NUM_GPUS:
        return _skipped(place, "its roles name one GPU, and it takes two")
    return None


def add_together(ways: Ways, requirements_digest: str) -> Check:
    """Run the two ranks and judge them; one round trip, on GPUs three more.

    requirements_digest: of the bundle, by which the container's python is found.
    """
    place = ways.place
    if not uses_gpus(place.container):
        return _run(ways, requirements_digest, [], "gloo on the CPU")
    container = place.container
    directory = str(Workspace.at(container.workspace).rehearsal(_TAG, "x"))[:-1]  # ends with /
    holder = Holder(_TAG, container.host_name, container.vmid, directory, new_token())
    try:
        gpus, claim = claim_idle(ways, _NUM_GPUS, holder)
    except RefusedError as error:
        return _skipped(place, f"it takes two idle GPUs: {error.message}")
    except DflashctlError as error:
        return unable(place, error)
    with claim:
        over = f"nccl over GPU {', '.join(str(gpu.index) for gpu in gpus)}"
        return _run(ways, requirements_digest, [gpu.uuid for gpu in gpus], over)


def unable(place: Place, error: DflashctlError) -> Check:
    """Return the check for a place where the ranks could not be started or asked."""
    checks = Checks(place.label)
    checks.fail(NAME, error.message, error.hint)
    return checks.noted[0]


def _run(ways: Ways, requirements_digest: str, uuids: list[str], over: str) -> Check:
    container = ways.place.container
    arguments: dict[str, Any] = {
        "workspace": container.workspace,
        "python": container.python,
        "requirements_digest": requirements_digest,
        "backend": "nccl" if uuids else "gloo",
        "devices": uuids,
        "counts": _GPU_COUNTS if uuids else _COUNTS,
        "limits": _LIMITS_S,
        "run_dir": str(Workspace.at(container.workspace).rehearsal(_TAG, "ranks")),
    }
    # By stdin: it may hold tokens, and arguments are seen in the process list.
    environment = json.dumps(container.env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).encode()
    program = Program("all_reduce", arguments, [environment], _PROGRAM_S, container.python)
    try:
        answer = run_program(ways.inside, program)
    except DflashctlError as error:
        return unable(ways.place, error)
    return judge_all_reduce(ways.place.label, answer, over)


def _skipped(place: Place, why: str) -> Check:
    checks = Checks(place.label)
    checks.skip(NAME, why)
    return checks.noted[0]
