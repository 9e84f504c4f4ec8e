"""doctor --nccl: two real ranks over gloo, one of them with a broken torch.distributed; the lab."""

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflashctl import remote
from dflashctl.diagnosis import Check
from dflashctl.diagnosis.all_reduce import judge_all_reduce
from dflashctl.gpu_locks import Holder, list_locks
from dflashctl.gpu_roles import Ways, claim_idle
from dflashctl.inventory import Container, Host, Place, load_inventory
from dflashctl.lab.site import Lab
from dflashctl.operations.nccl import add_together, obstacle
from dflashctl.remote.processes import runs_alive
from dflashctl.transport import connect, connect_host
from tests.dflashctl.act.conftest import Project, held_gpu

pytestmark = pytest.mark.timeout(90)

# Python imports it before anything else; what it breaks is rank 1, after the sums are there.
BROKEN = """
import sys
if "--rank" in sys.orig_argv:
    import time
    import torch.distributed
    whole = torch.distributed.all_reduce
    def all_reduce(numbers):
        whole(numbers)
        if sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "1":
            {fault}
    torch.distributed.all_reduce = all_reduce
"""
LIMITS_S = {"start": 60, "import": 60, "join": 60, "all_reduce": 60, "timing": 60, "leave": 60}


def reduce_all(root: Path, **changed: Any) -> dict[str, Any]:
    """Run the program with what lies in ``root`` before everything that can be imported."""
    arguments = {
        "workspace": str(root),
        "python": sys.executable,
        "requirements_digest": "none",
        "backend": "gloo",
        "devices": [],
        "counts": [1, 1025],
        "limits": LIMITS_S,
        "run_dir": f"{root}/nccl/ranks",
    }
    argv = [sys.executable, "-I", "-S", "-c", remote.program("all_reduce")]
    done = subprocess.run(
        [*argv, json.dumps(arguments | changed)],
        input=json.dumps({"PYTHONPATH": str(root)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{root}/nccl/ranks" not in {run_dir for _, run_dir in runs_alive()}, "a rank is left"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def nccl(answer: dict[str, Any]) -> Check:
    return judge_all_reduce("kpro6/200", answer, "nccl over GPU 0, 1")


def test_the_verb_lets_two_ranks_add_and_tells_seconds_and_speed(project: Project) -> None:  # F60
    document = project.document("doctor", "--nccl")
    (check,) = [check for check in document["checks"] if check["name"] == "all_reduce"]
    assert (document["rc"], check["place"], check["status"]) == (0, "here/self", "ok"), document
    speed = r"gloo on the CPU: values exact, \d+\.\d s, bus \d+\.\d\d GB/s for 4 MiB"
    assert re.fullmatch(speed, check["found"])


def test_wrong_values_are_told_with_the_first_of_them_and_the_setting_to_try(  # F60
    tmp_path: Path,
) -> None:
    fault = "numbers[300:] = 0  # as where a GPU reads its neighbour's memory as zeros"
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(fault=fault))
    check = nccl(reduce_all(tmp_path))
    assert check.status == "FAIL"
    assert check.found == (
        "nccl over GPU 0, 1: wrong values: rank 1 has 725 of 1025 numbers wrong, first [300]: 0,"
        " must be 150"
    )
    assert check.fix.startswith("env: {NCCL_P2P_DISABLE: '1'} of kpro6/200 in hosts.yaml")
    assert "ACS" in check.fix
    assert "one container" in check.fix


def test_a_rank_that_hangs_is_told_with_the_place_where_it_stands(tmp_path: Path) -> None:  # F60
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(fault="time.sleep(600)"))
    answer = reduce_all(tmp_path, limits=LIMITS_S | {"all_reduce": 3})
    check = nccl(answer)
    found = re.sub(r" for \d+ s", "", check.found)
    assert check.status == "FAIL"
    assert found == (
        "nccl over GPU 0, 1: hang: rank 1 stands in the all_reduce of 1 numbers; rank 0 stands in"
        " the all_reduce of 1025 numbers"
    )
    assert "NCCL_P2P_DISABLE" in check.fix
    stuck = nccl(answer | {"stuck_pids": [71, 72]}).found
    assert stuck.endswith("; pids 71, 72 in the container cannot be killed (stuck in the driver)")


def test_an_error_of_torch_is_told_in_its_words(tmp_path: Path) -> None:
    raises = "import os\nraise RuntimeError('no peer for ' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
    (tmp_path / "torch.py").write_text(raises)
    check = nccl(reduce_all(tmp_path, backend="nccl", devices=["GPU-a", "GPU-b"]))
    assert check.status == "FAIL"
    assert check.found.endswith(" failed: RuntimeError: no peer for GPU-a,GPU-b")
    assert "NCCL_DEBUG" in check.fix
    gone = nccl(reduce_all(tmp_path, python="/nowhere/python"))
    assert "rank 0 failed: /nowhere/python: " in gone.found


def test_the_ranks_are_not_started_where_something_else_is_to_be_mended_first() -> None:
    def why(target: tuple[str, ...], drafter: tuple[str, ...], *checks: Check) -> str | None:
        box = Container("pve1", 101, target=target, drafter=drafter)
        host = Host("pve1", "root@pve1", containers=(box,))
        found = obstacle(Place(host, box), checks)
        return None if found is None else f"{found.status}: {found.found}"

    assert why(("0",), ("1",), Check("pve1/101", "CUDA", "ok", "")) is None
    assert why(("0",), ("1",), Check("pve1/105", "CUDA", "FAIL", "")) is None
    assert why(("0",), ("1",), Check("pve1/101", "CUDA", "FAIL", "")) == "skipped: see `CUDA`"
    lost = Check("pve1/101", "reach", "skipped", "")
    assert why(("cpu",), ("cpu",), lost) == "skipped: see `reach`"
    assert why(("0",), ("0",)) == "skipped: its roles name one GPU, and it takes two"
    assert why(("cpu",), ("cpu",)) is None


@pytest.mark.lab
def test_two_idle_gpus_are_locked_for_the_ranks_and_let_go(tmp_path: Path, lab_site: Lab) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(lab_site.hosts_yaml())  # the container's own python has no torch
    lab_site.in_container("kpro6", 200, held_gpu(0))
    place = load_inventory(hosts).one(["kpro6/200"])
    with closing(connect(place)) as inside, closing(connect_host(place.host)) as node:
        ways = Ways(place, inside, node)
        others = Holder("fresh7", "kpro6", 200, "/workspace/runs/fresh7", "token")
        gpus, claim = claim_idle(ways, 6, others)
        with claim:
            assert [gpu.index for gpu in gpus] == [1, 2, 3, 4, 5, 6]
            few = add_together(ways, "none")
            assert few.status == "skipped"
            assert few.found.startswith("it takes two idle GPUs: GPU 0 (GPU-")
        check = add_together(ways, "none")
        assert check.status == "FAIL"
        assert re.fullmatch(
            r"nccl over GPU 1, 2: rank \d failed: ModuleNotFoundError: No module named 'torch'",
            check.found,
        )
        assert list_locks(node) == ()
