"""What nvidia-smi said, by hand, and what must be made of it; unknown is never idle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import ConfigurationError, MismatchError, RefusedError, StateUnknownError
from dflashctl.gpu_roles import claim, cpu_roles, require_visible, unexpected, uses_gpus
from dflashctl.gpus import GpuState, Probe, View, parse
from dflashctl.inventory import Container, Expect, Host, Place
from dflashctl.operations.gpus import look_at_gpus
from dflashctl.render.gpus import gpus_text
from trainer.contract.manifest import Gpu

MIB = 1 << 20
CARD = "NVIDIA H200"
LOST_INSIDE = "Failed to initialize NVML: Unknown Error"


def row(text: str, ecc: str = "0") -> str:
    """A row of nvidia-smi: index, uuid, name, memory used and total, utilisation; ecc, bus."""
    return f"{text}, {ecc}, 00000000:0{text[0]}:00.0"


def process(pid: int, command: str, vmid: int | None = None, **extra: Any) -> dict[str, Any]:
    plain = {"inside_pid": None, "state": "S", "user": "root", "age_s": 9}
    return {"pid": pid, "command": command, "vmid": vmid, **plain, **extra}


def answer(rows: list[str], apps: Sequence[str] = (), **extra: Any) -> dict[str, Any]:
    """What remote/gpus.py prints on a node."""
    gpus = {"rows": rows, "rc": extra.pop("rc", 0), "problem": extra.pop("problem", "")}
    return {
        "installed": True,
        "stuck": None,
        "gpus": gpus | {"failed": extra.pop("failed", {})},
        "apps": {"apps": list(apps), "rc": extra.pop("apps_rc", 0)},
        "processes": extra.pop("processes", []),
        "cards": extra.pop("cards", []),
        "inside": {},
        "locks": extra.pop("locks", []),
        **extra,
    }


def only(raw: dict[str, Any], **how: Any) -> GpuState:
    (gpu,) = parse(raw, **how).gpus
    return gpu


def test_an_empty_card_is_idle() -> None:
    gpu = only(answer([row(f"0, GPU-a, {CARD}, 4, 143771, 0")]))
    assert gpu == GpuState(0, "GPU-a", CARD, 4 * MIB, 143771 * MIB, 0.0, "idle")


def test_a_foreign_process_is_named_with_container_both_pids_and_command() -> None:  # F30
    facts = process(48122, "python serve.py --port 80", 105, user="u100033", inside_pid=311)
    raw = answer(
        [row(f"0, GPU-a, {CARD}, 900, 143771, 3")], ["GPU-a, 48122, python, 890"], processes=[facts]
    )
    gpu = only(raw)
    assert gpu.state == "foreign"
    assert gpu.reason == "CT 105 pid 48122 (311 inside) python serve.py --port 80"
    (owner,) = gpu.owners
    assert (owner.user, owner.vmid, owner.inside_pid, owner.tag) == ("u100033", 105, 311, None)
    assert owner.memory_bytes == 890 * MIB


def test_a_process_of_a_run_is_ours_and_a_stranger_beside_it_makes_it_foreign() -> None:
    ours = process(7, "python -m trainer train --run-dir /w/runs/fresh7", 200, inside_pid=3)
    theirs = process(8, "./miner")
    rows = [row(f"0, GPU-a, {CARD}, 900, 143771, 3")]
    gpu = only(answer(rows, ["GPU-a, 7, python, 890"], processes=[ours]))
    assert (gpu.state, gpu.reason) == ("ours", "run fresh7 (CT 200 pid 7, 3 inside)")
    both = ["GPU-a, 7, python, 890", "GPU-a, 8, ./miner, 10"]
    gpu = only(answer(rows, both, processes=[ours, theirs]))
    assert gpu.state == "foreign"
    assert gpu.reason == "run fresh7 (CT 200 pid 7, 3 inside); node pid 8 ./miner"


@pytest.mark.parametrize(
    ("text", "ecc", "apps_rc", "state", "words"),
    [
        ("0, GPU-a, X, 1, 24576, 40", "0", 0, "foreign", "utilisation 40%"),
        ("0, GPU-a, X, 1, 24576, [N/A]", "[N/A]", 0, "idle", ""),
        ("0, GPU-a, X, [N/A], 24576, 0", "0", 0, "unknown", "the driver says [N/A] of its memory"),
        ("0, GPU-a, X, 1, 24576, 0", "0", 9, "unknown", "does not list its processes"),
        ("0, GPU-a, X, 8123, 24576, 0", "0", 9, "unknown", "does not list its processes"),
        ("0, GPU-a, X, [GPU is lost], 9, 0", "0", 0, "failed", "the driver says [GPU is lost]"),
        ("0, GPU-a, X, [Unknown Error], 9, 0", "0", 0, "failed", "says [Unknown Error]"),
        ("0, GPU-a, X, 1, 24576, 0", "4", 0, "failed", "4 uncorrected ECC errors"),
    ],
)
def test_doubt_is_told_and_never_idle(
    text: str, ecc: str, apps_rc: int, state: str, words: str
) -> None:
    gpu = only(answer([row(text, ecc)], apps_rc=apps_rc))
    assert gpu.state == state
    assert words in gpu.reason


def test_memory_of_no_process_is_orphaned_and_tells_open_devices_and_state_d() -> None:  # F32
    rows = [row("0, GPU-a, X, 41000, 81559, 0")]
    stuck = process(77, "python train.py", 105, state="D")
    daemon = process(5, "/usr/bin/nvidia-persistenced --user x")
    task = process(99, "[nv_queue]", state="D")
    gpu = only(answer(rows, devices={"0": [daemon, stuck]}, waiting=[stuck, task]))
    assert gpu.state == "orphaned"
    assert gpu.reason == (
        "41000 MiB held by no process, even on the node; /dev/nvidia0 is open in CT 105 pid 77"
        " python train.py (state D); in state D: node pid 99 [nv_queue] (state D)"
    )
    # The device node's number is the kernel's, which need not be nvidia-smi's index.
    cards = [{"bus_id": "0000:01:00.0", "uuid": "GPU-a", "name": "X", "minor": "3"}]
    gpu = only(answer(rows, cards=cards, devices={"3": [process(900, "Xorg :0")]}))
    assert gpu.state == "foreign"
    assert "/dev/nvidia3 is open in node pid 900 Xorg :0" in gpu.reason


def test_memory_seen_only_from_inside_a_container_has_an_unknown_owner() -> None:  # F30
    gpu = only(answer([row("0, GPU-a, X, 8123, 24576, 0")]), from_node=False)
    assert (gpu.state, gpu.reason) == (
        "foreign",
        "8123 MiB held, owner unknown: it is seen only from inside a container",
    )


def test_rows_of_healthy_cards_survive_a_lost_one_which_is_failed_by_its_uuid() -> None:  # F36
    lost = "Unable to determine the device handle for GPU0000:BA:00.0: Unknown Error"
    rows = [row(f"0, GPU-a, {CARD}, 4, 9, 0"), row(f"2, GPU-c, {CARD}, 4, 9, 0")]
    cards = [{"bus_id": "0000:ba:00.0", "uuid": "GPU-b", "name": CARD, "minor": "1"}]
    found = parse(answer(rows, rc=15, problem=lost, cards=cards))
    assert [(gpu.uuid, gpu.state) for gpu in found.gpus] == [
        ("GPU-a", "idle"),
        ("GPU-c", "idle"),
        ("GPU-b", "failed"),
    ]
    assert found.problem == lost


def test_a_driver_that_does_not_answer_is_wedged_and_its_rows_are_not_idle() -> None:  # F34
    nothing = parse(answer([], rc=None, apps_rc=None))
    assert (nothing.gpus, nothing.wedged) == ((), True)
    assert "no answer within 10 s" in nothing.problem
    cards = [{"bus_id": "0000:01:00.0", "uuid": "GPU-a", "name": "X", "minor": "0"}]
    (known,) = parse(answer([], rc=None, apps_rc=None, cards=cards)).gpus
    assert (known.uuid, known.state) == ("GPU-a", "wedged")
    stuck = {"pid": 4242, "state": "D", "age_s": 180}
    halfway = answer([row(f"0, GPU-a, {CARD}, 4, 9, 0")], apps_rc=None) | {"stuck": stuck}
    found = parse(halfway)
    assert found.wedged
    assert found.gpus[0].state == "wedged"
    assert "pid 4242 of 180 s ago is still stuck (state D), so no other" in found.problem
    with pytest.raises(StateUnknownError, match="cannot be asked") as raised:
        claim(container(("0",), ("0",)), found)
    assert raised.value.code == "gpu-wedged"


@pytest.mark.parametrize(
    ("rc", "said", "mismatch"),
    [
        (6, "No devices were found", True),
        (18, "Failed to initialize NVML: Driver/library version mismatch", True),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the driver", False),
    ],
)
def test_a_driver_without_rows_is_told_in_its_own_words(rc: int, said: str, mismatch: bool) -> None:
    found = parse(answer([], rc=rc, problem=said, apps_rc=rc))
    assert (found.gpus, found.problem, found.mismatch) == ((), said, mismatch)
    assert not found.wedged


@pytest.mark.parametrize(
    ("rc", "text", "view"),
    [
        (0, "GPU 0: X (UUID: GPU-a)\n", View(("GPU-a",))),
        (255, f"{LOST_INSIDE}\n", View((), LOST_INSIDE)),
        (255, "container '201' not running!", View((), listed=False)),
        (127, "timeout: failed to run command 'nvidia-smi'", View((), listed=False)),
        (124, "", View((), "its nvidia-smi gave no answer within 10 s", listed=False)),
        (1, "sudo: no", View((), "it cannot be asked: sudo: no", listed=False)),
    ],
)  # fmt: skip
def test_what_a_container_sees_is_told_apart_from_not_being_able_to_ask(
    rc: int, text: str, view: View
) -> None:  # F39
    raw = answer([row(f"0, GPU-a, {CARD}, 4, 9, 0")]) | {
        "inside": {"200": {"rc": rc, "text": text}}
    }
    assert parse(raw).views == ((200, view),)


def test_no_nvidia_smi_is_no_driver_problem_of_the_node() -> None:
    found = parse({"installed": False, "locks": []})
    assert found == Probe((), "nvidia-smi is not installed", installed=False)


def test_a_process_name_with_commas_keeps_uuid_pid_and_memory() -> None:
    gpu = only(answer([row(f"0, GPU-a, {CARD}, 900, 9000, 3")], ["GPU-a, 8, a, b, c, 10"]))
    assert (gpu.owners[0].pid, gpu.owners[0].command) == (8, "a, b, c")
    assert gpu.owners[0].memory_bytes == 10 * MIB


def test_a_card_that_is_locked_and_still_empty_is_ours_but_for_the_holder_itself() -> None:  # F41
    lock = {"uuid": "GPU-a", "tag": "x", "host": "kpro6", "vmid": 200, "by": "me@laptop"}
    lock |= {"token": "t", "created_unix_s": 0.0, "pid": 7, "run_dir": "/w/runs/x"}
    lock |= {"state": "live", "why": "its process 7 lives"}
    rows = [row(f"0, GPU-a, {CARD}, 4, 9000, 0")]
    gpu = only(answer(rows, locks=[lock]))
    assert gpu.state == "ours"
    assert gpu.reason.startswith("locked: run x of me@laptop (kpro6/200), since ")
    assert gpu.reason.endswith(": its process 7 lives")
    assert only(answer(rows, locks=[lock]), token="t").state == "idle"
    assert only(answer(rows, locks=[lock | {"state": "stale"}])).state == "idle"


def container(target: tuple[str, ...], drafter: tuple[str, ...]) -> Container:
    return Container("kpro6", 200, target=target, drafter=drafter)


def test_roles_are_claimed_by_index_or_uuid_in_the_order_written() -> None:
    found = parse(answer([row(f"0, GPU-a, {CARD}, 4, 9, 0"), row(f"1, GPU-b, {CARD}, 4, 9, 0")]))
    assert claim(container(("GPU-b",), ("0",)), found) == (
        Gpu("target", 1, "GPU-b", CARD),
        Gpu("drafter", 0, "GPU-a", CARD),
    )


def test_one_card_may_have_both_roles() -> None:
    found = parse(answer([row(f"0, GPU-a, {CARD}, 4, 9, 0")]))
    roles = claim(container(("0",), ("GPU-a",)), found)
    assert roles == (Gpu("target", 0, "GPU-a", CARD), Gpu("drafter", 0, "GPU-a", CARD))


def test_a_card_with_two_names_in_a_role_is_refused() -> None:
    found = parse(answer([row(f"0, GPU-a, {CARD}, 4, 9, 0")]))
    with pytest.raises(ConfigurationError, match="GPU 0 stands twice under target: 0 and GPU-a"):
        claim(container(("0", "GPU-a"), ("0",)), found)


def test_a_busy_unknown_or_missing_card_is_never_claimed() -> None:
    texts = (
        f"0, GPU-a, {CARD}, 4, 9, 0",
        f"1, GPU-b, {CARD}, 8123, 9000, 0",
        "2, GPU-c, X, [N/A], 9, 0",
        "3, GPU-d, X, [GPU is lost], 9, 0",
    )
    found = parse(answer([row(text) for text in texts]))
    with pytest.raises(RefusedError, match=r"GPU 1 .GPU-b. is not idle: 8123 MiB held") as raised:
        claim(container(("0",), ("1",)), found)
    assert raised.value.code == "gpu-orphaned"
    with pytest.raises(StateUnknownError, match="GPU 2"):
        claim(container(("0",), ("2",)), found)
    with pytest.raises(MismatchError, match=r"GPU 3 .GPU-d. has failed: the driver says"):
        claim(container(("0",), ("3",)), found)
    with pytest.raises(MismatchError, match=r"GPU 7 .* is not there .found: 0, 1, 2"):
        claim(container(("0",), ("7",)), found)


def test_other_cards_than_hosts_yaml_expects_are_told() -> None:  # F44
    found = parse(answer([row(f"0, GPU-a, {CARD}, 4, 9, 0"), row("1, GPU-b, T4, 4, 9, 0")]))
    assert unexpected(found.gpus, Expect(2)) == ""
    assert unexpected(found.gpus, Expect(8)) == "hosts.yaml expects 8 GPUs, and 2 are there"
    told = unexpected(found.gpus, Expect(2, "H200"))
    assert told == "hosts.yaml expects H200, and GPU 1 (GPU-b) is T4"


def test_cpu_roles_need_no_gpu_and_a_mixture_is_refused() -> None:
    assert uses_gpus(container(("0",), ("1",))) is True
    assert uses_gpus(container(("cpu",), ("cpu", "cpu"))) is False
    assert len(cpu_roles(container(("cpu",), ("cpu", "cpu")))) == 3
    with pytest.raises(ConfigurationError, match="mixes cpu and GPUs"):
        uses_gpus(container(("cpu",), ("1",)))
    with pytest.raises(ConfigurationError, match=r"no GPU for the role target$"):
        uses_gpus(container((), ("1",)))


def test_a_card_that_the_container_does_not_see_is_refused() -> None:
    gpus = (Gpu("target", 0, "GPU-a", CARD), Gpu("drafter", 1, "GPU-b", CARD))
    require_visible(gpus, {}, "kpro6/200")
    require_visible(gpus, {"gpu_uuids": ["GPU-b", "GPU-a"]}, "kpro6/200")
    with pytest.raises(MismatchError, match=r"GPU 1 .* not in the container$"):
        require_visible(gpus, {"gpu_uuids": ["GPU-a"]}, "kpro6/200")
    # F39
    broken = {"gpu_uuids": [], "gpu_problem": "Failed to initialize NVML: Unknown Error"}
    with pytest.raises(MismatchError, match="the container lost its GPUs, and the node") as raised:
        require_visible(gpus, broken, "kpro6/200")
    assert raised.value.hint == "restart the container: pct reboot 200"
    with pytest.raises(StateUnknownError, match="in the container gave no answer within 10 s"):
        require_visible(gpus, {"gpu_uuids": [], "gpu_silent": True}, "kpro6/200")


def test_this_machine_answers_as_a_host_and_the_table_has_a_row(tmp_path: Path) -> None:
    own = Container("here", None, workspace=str(tmp_path), target=("cpu",), drafter=("cpu",))
    host = Host("here", "", backend="local", containers=(own,))
    (found,) = look_at_gpus([Place(host, own)])
    lines = gpus_text([found]).splitlines()
    assert lines[0].split()[:4] == ["HOST", "GPU", "NAME", "UUID"]
    assert lines[1].startswith("here")
    assert look_at_gpus([]) == []
