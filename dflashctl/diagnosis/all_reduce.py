"""What the answer of ``remote/all_reduce.py`` means: one check, with its fix."""

from typing import Any

from dflashctl.diagnosis.check import Check, Checks

NAME = "all_reduce"
_MIB = 1 << 20
# GPUs that reach each other through an IOMMU, or ACS on the bridges, hang or read zeros.
_PEERS = (
    "env: {{NCCL_P2P_DISABLE: '1'}} of {place} in hosts.yaml, then the same again; when that helps:"
    " the IOMMU or ACS stands between the GPUs (iommu=pt, or ACS off in the BIOS), and GPUs that"
    " work together belong in one container"
)
_STAGES = {
    "start": "its start",
    "import": "the import of torch",
    "join": "joining the other",
    "timing": "the timed all_reduces",
    "leave": "leaving the group",
}

Json = dict[str, Any]


def judge_all_reduce(place: str, answer: Json, over: str) -> Check:
    """Return the check of a place; ``over``: backend and devices, "nccl over GPU 0, 1"."""
    checks = Checks(place)
    # gloo knows no peers: what fails there is the machine's memory or network.
    fix = _PEERS.format(place=place) if over.startswith("nccl") else "look at the node's dmesg"
    match answer["outcome"]:
        case "ok":
            checks.ok(NAME, f"{over}: {_speed(answer)}")
        case "wrong":
            checks.fail(NAME, f"{over}: wrong values: {_wrong(answer)}", fix)
        case "hang":
            first, *others = answer["standing"]
            found = f"{over}: hang: {_standing(first)}"
            found += "".join(f"; {_standing(other)}" for other in others)
            checks.fail(NAME, found + _stuck(answer), fix)
        case _:
            found = f"{over}: rank {answer['rank']} failed: {answer['text']}"
            again = "NCCL_DEBUG: INFO in `env` of hosts.yaml says more" if "nccl" in over else ""
            checks.fail(NAME, found + _stuck(answer), again)
    return checks.noted[0]


def _speed(answer: Json) -> str:
    return (
        f"values exact, {answer['seconds']:.1f} s, bus {answer['bus_gb_per_s']:.2f} GB/s"
        f" for {answer['bytes'] / _MIB:.0f} MiB"
    )


def _wrong(answer: Json) -> str:
    return (
        f"rank {answer['rank']} has {answer['num_wrong']} of {answer['count']} numbers wrong, first"
        f" [{answer['index']}]: {answer['found']:g}, must be {answer['expected']:g}"
    )


def _standing(rank: Json) -> str:
    stage = _STAGES.get(rank["stage"], f"the all_reduce of {rank.get('count')} numbers")
    return f"rank {rank['rank']} stands in {stage} for {rank['s']:.0f} s"


def _stuck(answer: Json) -> str:
    """Name the processes that SIGKILL does not end; their GPUs stay locked."""
    pids = ", ".join(str(pid) for pid in answer["stuck_pids"])
    return f"; pids {pids} in the container cannot be killed (stuck in the driver)" if pids else ""
