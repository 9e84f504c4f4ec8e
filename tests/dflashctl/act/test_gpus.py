"""What nvidia-smi said, by hand, and what must be made of it; unknown is never idle."""

from pathlib import Path

import pytest

from dflashctl.errors import ConfigurationError, MismatchError, RefusedError, StateUnknownError
from dflashctl.gpu_roles import claim, cpu_roles, require_visible, uses_gpus
from dflashctl.gpus import GpuState, Probe, parse
from dflashctl.inventory import Container, Host, Place
from dflashctl.operations.gpus import look_at_gpus
from dflashctl.render.receipts import gpus_text
from trainer.contract.manifest import Gpu

MIB = 1 << 20
CARD = "NVIDIA H200"


def answer(rows: str, apps: str = "", facts: str = "", rc: int = 0, apps_rc: int = 0) -> str:
    return f"@gpus\n{rows}\n\n@rc {rc}\n@apps\n{apps}\n@rc {apps_rc}\n{facts}"


def only(text: str) -> GpuState:
    (gpu,) = parse(text).gpus
    return gpu


def test_an_empty_card_is_idle() -> None:
    gpu = only(answer(f"0, GPU-a, {CARD}, 4, 143771, 0"))
    assert gpu == GpuState(0, "GPU-a", CARD, 4 * MIB, 143771 * MIB, 0.0, "idle")


def test_a_foreign_process_is_named_with_container_pid_and_command() -> None:
    facts = "@pid 48122\nu100033\n   4000\n/lxc/105\n@cmd python serve.py --port 80 \n"
    gpu = only(answer(f"0, GPU-a, {CARD}, 900, 143771, 3", "GPU-a, 48122, python, 890", facts))
    assert gpu.state == "busy"
    assert gpu.reason == "CT 105 pid 48122 python serve.py --port 80"
    (owner,) = gpu.owners
    assert (owner.user, owner.vmid, owner.age_s, owner.tag) == ("u100033", 105, 4000, None)
    assert owner.memory_bytes == 890 * MIB


def test_a_process_of_a_run_is_ours_and_a_stranger_beside_it_makes_it_busy() -> None:
    ours = "@pid 7\nroot\n9\n/lxc/200\n@cmd python -m trainer train --run-dir /w/runs/fresh7\n"
    theirs = "@pid 8\nroot\n9\n@cmd ./miner\n"
    row = f"0, GPU-a, {CARD}, 900, 143771, 3"
    gpu = only(answer(row, "GPU-a, 7, python, 890", ours))
    assert (gpu.state, gpu.reason) == ("ours", "run fresh7 (CT 200 pid 7)")
    both = only(answer(row, "GPU-a, 7, python, 890\nGPU-a, 8, ./miner, 10", ours + theirs))
    assert both.state == "busy"
    assert both.reason == "run fresh7 (CT 200 pid 7); node pid 8 ./miner"


@pytest.mark.parametrize(
    ("row", "apps_rc", "state", "words"),
    [
        ("0, GPU-a, X, 8123, 24576, 0", 0, "busy", "8123 MiB held, and no process is visible"),
        ("0, GPU-a, X, 1, 24576, 40", 0, "busy", "utilisation 40%"),
        ("0, GPU-a, X, 1, 24576, [N/A]", 0, "idle", ""),
        ("0, GPU-a, X, [N/A], 24576, 0", 0, "unknown", "the driver says [N/A] of its memory"),
        ("0, GPU-a, X, 1, 24576, 0", 9, "unknown", "does not list its processes"),
    ],
)
def test_doubt_is_told_and_never_idle(row: str, apps_rc: int, state: str, words: str) -> None:
    gpu = only(answer(row, apps_rc=apps_rc))
    assert gpu.state == state
    assert words in gpu.reason


def test_rows_of_healthy_cards_survive_a_lost_one() -> None:
    lost = "Unable to determine the device handle for GPU0000:BA:00.0: Unknown Error"
    found = parse(answer(f"0, GPU-a, {CARD}, 4, 9, 0\n{lost}\n2, GPU-c, {CARD}, 4, 9, 0", rc=15))
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert found.problem == lost


@pytest.mark.parametrize("text", ["@gpus\n\n@rc 124\n", "@gpus\n\n@rc 137\n", "@gpus\n"])
def test_a_driver_that_does_not_answer_is_a_problem(text: str) -> None:
    found = parse(text)
    assert found.gpus == ()
    assert "no answer" in found.problem


def test_no_nvidia_smi_is_no_driver_problem_of_the_node() -> None:
    assert parse("@none\n") == Probe((), "nvidia-smi is not installed", installed=False)


def test_a_process_name_with_commas_keeps_uuid_pid_and_memory() -> None:
    gpu = only(answer(f"0, GPU-a, {CARD}, 900, 9000, 3", "GPU-a, 8, a, b, c, 10"))
    assert (gpu.owners[0].pid, gpu.owners[0].command) == (8, "a, b, c")
    assert gpu.owners[0].memory_bytes == 10 * MIB


def container(target: tuple[str, ...], drafter: tuple[str, ...]) -> Container:
    return Container("kpro6", 200, target=target, drafter=drafter)


def test_roles_are_claimed_by_index_or_uuid_in_the_order_written() -> None:
    found = parse(answer(f"0, GPU-a, {CARD}, 4, 9, 0\n1, GPU-b, {CARD}, 4, 9, 0"))
    assert claim(container(("GPU-b",), ("0",)), found) == (
        Gpu("target", 1, "GPU-b", CARD),
        Gpu("drafter", 0, "GPU-a", CARD),
    )


def test_a_busy_unknown_or_missing_card_is_never_claimed() -> None:
    rows = f"0, GPU-a, {CARD}, 4, 9, 0\n1, GPU-b, {CARD}, 8123, 9000, 0\n2, GPU-c, X, [N/A], 9, 0"
    found = parse(answer(rows))
    with pytest.raises(RefusedError, match=r"GPU 1 .GPU-b. is not idle: 8123 MiB held"):
        claim(container(("0",), ("1",)), found)
    with pytest.raises(StateUnknownError, match="GPU 2"):
        claim(container(("0",), ("2",)), found)
    with pytest.raises(MismatchError, match=r"GPU 7 .* is not there .found: 0, 1, 2"):
        claim(container(("0",), ("7",)), found)


def test_cpu_roles_need_no_gpu_and_a_mixture_is_refused() -> None:
    assert uses_gpus(container(("0",), ("1",))) is True
    assert uses_gpus(container(("cpu",), ("cpu", "cpu"))) is False
    assert len(cpu_roles(container(("cpu",), ("cpu", "cpu")))) == 3
    with pytest.raises(ConfigurationError, match="mixes cpu and GPUs"):
        uses_gpus(container(("cpu",), ("1",)))
    with pytest.raises(ConfigurationError, match="no GPUs for both roles"):
        uses_gpus(container((), ("1",)))


def test_a_card_that_the_container_does_not_see_is_refused() -> None:
    gpus = (Gpu("target", 0, "GPU-a", CARD), Gpu("drafter", 1, "GPU-b", CARD))
    require_visible(gpus, {}, "kpro6/200")
    require_visible(gpus, {"gpu_uuids": ["GPU-b", "GPU-a"]}, "kpro6/200")
    with pytest.raises(MismatchError, match=r"GPU 1 .* not in the container$"):
        require_visible(gpus, {"gpu_uuids": ["GPU-a"]}, "kpro6/200")
    broken = {"gpu_uuids": [], "gpu_problem": "NVML version mismatch"}
    with pytest.raises(MismatchError, match=r"GPU 0 .* says: NVML version mismatch"):
        require_visible(gpus, broken, "kpro6/200")


def test_this_machine_answers_as_a_host_and_the_table_has_a_row(tmp_path: Path) -> None:
    own = Container("here", None, workspace=str(tmp_path), target=("cpu",), drafter=("cpu",))
    host = Host("here", "", backend="local", containers=(own,))
    (found,) = look_at_gpus([Place(host, own)])
    lines = gpus_text([found]).splitlines()
    assert lines[0].split()[:4] == ["HOST", "GPU", "NAME", "UUID"]
    assert lines[1].startswith("here")
    assert look_at_gpus([]) == []
