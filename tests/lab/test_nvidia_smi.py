"""The stand-in nvidia-smi: who sees which process, broken GPUs, and the forms of its answers."""

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator

import pytest

from dflashctl.lab.site import Lab
from dflashctl.lab.state import read_json, write_json

Ssh = Callable[..., subprocess.CompletedProcess[bytes]]
Load = Callable[..., None]
pytestmark = pytest.mark.lab

APPS = "nvidia-smi --query-compute-apps=pid,process_name,used_memory,gpu_uuid --format=csv,noheader"
USED = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"
UUID = "GPU-5eed{0:04x}-1ab0-4c0d-8e00-{0:012x}"
# What the tests start holds "sleep 9876" in its command line; this shell holds "[9]".
END_MARKED = """for p in /proc/[0-9]*; do
    tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q 'sleep [9]876' && kill -KILL ${p#/proc/}
done
while pgrep -fx 'sleep 9876' >/dev/null; do sleep 0.05; done"""

ONE_RUNS, TWO_RUN = (f"[ $(pgrep -cfx 'sleep 9876') = {count} ]" for count in (1, 2))


def in_host(lab: Lab, host: str, script: str) -> list[str]:
    return lab.in_host(host, ["sh", "-c", script]).stdout.decode().splitlines()


def in_container(lab: Lab, host: str, script: str) -> list[str]:
    return lab.in_container(host, 200, script).stdout.decode().splitlines()


def start(lab: Lab, host: str, vmid: int, script: str, until: str = ONE_RUNS) -> None:
    """Run a script in the background of a container until the fixture `load` ends it.

    Returns when the condition ``until`` holds there: what was started is what it is to be.
    """
    wait = f"until {until}; do sleep 0.05; done"
    lab.in_container(host, vmid, f"({script}) </dev/null >/dev/null 2>&1 & {wait}")


@pytest.fixture
def load(lab_site: Lab) -> Iterator[Load]:
    """load(host, script, until=ONE_RUNS): start marked processes; they end with the test."""

    def run(host: str, script: str, until: str = ONE_RUNS) -> None:
        start(lab_site, host, 200, script, until)

    yield run
    for host in ("kpro6", "kpro7"):
        lab_site.in_host(host, ["sh", "-c", END_MARKED])


def test_a_marked_process_shows_on_the_host_by_its_pid_there_and_maps_to_its_container(
    lab_site: Lab, load: Load
) -> None:
    load("kpro6", "PVE_LAB_GPU_MIB=9000 CUDA_VISIBLE_DEVICES=1,3 sleep 9876")
    rows = [row.split(", ") for row in in_host(lab_site, "kpro6", APPS)]
    pid = rows[0][0]
    assert rows == [[pid, "sleep", "9000 MiB", UUID.format(n)] for n in (1, 3)]
    cgroup = in_host(lab_site, "kpro6", f"cat /proc/{pid}/cgroup")
    assert {m for line in cgroup for m in re.findall(r"/lxc/(\d+)", line)} == {"200"}
    assert in_host(lab_site, "kpro6", f"tr '\\0' ' ' < /proc/{pid}/cmdline") == ["sleep 9876 "]


def test_a_container_sees_the_memory_but_no_process(lab_site: Lab, load: Load) -> None:
    load("kpro6", "PVE_LAB_GPU_MIB=9000 CUDA_VISIBLE_DEVICES=1,3 sleep 9876")
    used = ["1", "9001", "1", "9001", "1", "1", "1", "1"]
    assert in_container(lab_site, "kpro6", USED) == used
    assert in_host(lab_site, "kpro6", USED) == used
    assert in_container(lab_site, "kpro6", APPS) == []
    assert "No running processes found" in "\n".join(in_container(lab_site, "kpro6", "nvidia-smi"))
    busy = "nvidia-smi -i 1 --query-gpu=utilization.gpu --format=csv,noheader"
    assert in_container(lab_site, "kpro6", busy) == ["97 %"]


def test_a_container_shows_processes_when_told_to(lab_site: Lab, load: Load) -> None:
    gpu_json = lab_site.state / "kpro6/shared/gpu.json"
    write_json(gpu_json, {**read_json(gpu_json), "hide_container_processes": False})
    load("kpro6", "PVE_LAB_GPU_MIB=500 CUDA_VISIBLE_DEVICES=0 sleep 9876")
    assert in_container(lab_site, "kpro6", APPS) == in_host(lab_site, "kpro6", APPS) != []


@pytest.mark.usefixtures("load")
def test_memory_of_a_process_in_another_container_or_on_the_host_shows_too(lab_site: Lab) -> None:
    lab_site.in_host("kpro6", ["pct", "start", "201"])
    start(lab_site, "kpro6", 201, "PVE_LAB_GPU_MIB=700 CUDA_VISIBLE_DEVICES=5 sleep 9876")
    job = "PVE_LAB_GPU_MIB=800 CUDA_VISIBLE_DEVICES=6 sleep 9876"
    wait = f"until {TWO_RUN}; do sleep 0.05; done"  # a host sees those of its containers, too
    in_host(lab_site, "kpro6", f"{job} >/dev/null 2>&1 & {wait}")
    assert in_container(lab_site, "kpro6", USED)[5:7] == ["701", "801"]
    pids = [row.split(", ")[0] for row in in_host(lab_site, "kpro6", APPS)]
    cgroups = [in_host(lab_site, "kpro6", f"cat /proc/{pid}/cgroup") for pid in pids]
    assert ["/lxc/201" in "".join(c) for c in cgroups] == [True, False]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES=1", [1]),
        ("CUDA_VISIBLE_DEVICES=" + UUID.format(0), [0]),
        ("CUDA_VISIBLE_DEVICES=GPU-5eed0001", [1]),
        ("CUDA_VISIBLE_DEVICES=0," + UUID.format(1), [0, 1]),
        ("CUDA_VISIBLE_DEVICES=", []),
        ("", [0, 1]),
    ],
)
def test_visible_devices_are_read_as_numbers_and_as_uuids(
    lab_site: Lab, load: Load, devices: str, expected: list[int]
) -> None:
    load("kpro7", f"PVE_LAB_GPU_MIB=10 {devices} sleep 9876")
    used = in_host(lab_site, "kpro7", USED)
    assert [i for i, mib in enumerate(used) if mib == "11"] == expected


def test_of_a_tree_of_marked_processes_the_largest_alone_counts(lab_site: Lab, load: Load) -> None:
    # A small python starts a large one, as a runner starts a trainer; both carry the mark.
    child = "import time; held = b'x' * 50_000_000; open('/root/held', 'w'); time.sleep(9876)"
    argv = f"[sys.executable, '-c', {child!r}, 'sleep 9876']"
    parent = f"import subprocess, sys; subprocess.run({argv})"
    lab_site.in_container(
        "kpro7", 200, "rm -f /root/held; cat > /root/parent.py", stdin=parent.encode()
    )
    job = "PVE_LAB_GPU_MIB=10 /usr/bin/python3 /root/parent.py 'sleep 9876'"
    load("kpro7", job, until="[ -e /root/held ]")
    (pid,) = {row.split(",")[0] for row in in_host(lab_site, "kpro7", APPS)}
    size = in_host(lab_site, "kpro7", f"awk '/VmRSS/ {{print $2}}' /proc/{pid}/status")
    assert int(size[0]) > 48_000


def test_two_jobs_under_one_tmux_count_as_two(lab_site: Lab, load: Load) -> None:
    mark = "PVE_LAB_GPU_MIB=10 CUDA_VISIBLE_DEVICES=0"
    load("kpro7", f"{mark} tmux -L t new -d 'sleep 9876' ';' new -d 'sleep 9876'", TWO_RUN)
    assert in_host(lab_site, "kpro7", USED) == ["21", "1"]


BROKEN = {
    "no_driver": (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",
    ),
    "mismatch": (18, "Failed to initialize NVML: Driver/library version mismatch"),
    "no_devices": (6, "No devices were found"),
    "lost:1": (15, "Unable to determine the device handle for GPU1: 0000:02:00.0: GPU is lost."),
}


@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_driver_speaks_on_stdout_with_its_exit_code(lab_site: Lab, state: str) -> None:
    lab_site.fault("kpro7", "gpu", state)
    code, text = BROKEN[state]
    script = "nvidia-smi --query-gpu=index --format=csv"
    for done in (
        lab_site.in_container("kpro7", 200, script),
        lab_site.in_host("kpro7", ["sh", "-c", script]),
    ):
        assert (done.returncode, done.stderr) == (code, b"")
        assert done.stdout.decode().startswith(text)


def test_one_lost_gpu_does_not_hide_another_that_is_asked_for_alone(lab_site: Lab) -> None:
    lab_site.fault("kpro7", "gpu", "lost:1")
    assert in_container(lab_site, "kpro7", "nvidia-smi -i 0 -L") == [
        f"GPU 0: NVIDIA GeForce RTX 3090 (UUID: {UUID.format(0)})"
    ]


def test_lost_rows_keeps_the_healthy_rows(lab_site: Lab) -> None:
    lab_site.fault("kpro7", "gpu", "lost_rows:1")
    query = "nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv,noheader"
    assert in_container(lab_site, "kpro7", query) == [
        "0, 1 MiB, 24576 MiB",
        "1, [GPU is lost], [GPU is lost]",
    ]


def test_a_hung_driver_does_not_answer(lab_site: Lab) -> None:
    lab_site.fault("kpro7", "gpu", "hung")
    done = lab_site.in_container("kpro7", 200, "timeout 1 nvidia-smi -L")
    assert (done.returncode, done.stdout) == (124, b"")


def test_ecc_mig_and_busy_change_one_gpu(lab_site: Lab) -> None:
    for fault in ("ecc:0", "mig:0", "busy:1"):
        lab_site.fault("kpro7", "gpu", fault)
    fields = "ecc.errors.uncorrected.volatile.total,mig.mode.current,utilization.gpu,memory.used"
    query = f"nvidia-smi --query-gpu={fields} --format=csv,noheader"
    assert in_host(lab_site, "kpro7", query) == [
        "4, Enabled, [N/A], 1 MiB",
        "[N/A], [N/A], 97 %, 21505 MiB",
    ]
    assert in_host(lab_site, "kpro7", APPS) == [f"31337, python3, 21504 MiB, {UUID.format(1)}"]
    assert len(in_host(lab_site, "kpro7", "nvidia-smi -L")) == 4  # two MIG devices on GPU 0
    lab_site.fault("kpro7", "none")
    assert in_host(lab_site, "kpro7", USED) == ["1", "1"]


def test_the_csv_header_names_fields_and_units(lab_site: Lab) -> None:
    query = "nvidia-smi --query-gpu=index,gpu_uuid,memory.total,utilization.gpu,count --format=csv"
    assert in_host(lab_site, "kpro7", query)[:2] == [
        "index, gpu_uuid, memory.total [MiB], utilization.gpu [%], count",
        f"0, {UUID.format(0)}, 24576 MiB, 0 %, 2",
    ]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("--query-gpu=nonsense --format=csv", 2, 'Field "nonsense" is not a valid field to query.'),
        ("--query-gpu=index", 2, '"--format=" is a required option, when using "--query-*".'),
        ("--query-gpu=index --format=json", 2, "Invalid format."),
        ("--frobnicate", 2, "Invalid combination of input arguments."),
        ("-i 7 -L", 6, "No devices were found"),
    ],
)
def test_a_wrong_question_gets_the_real_ones_answer(
    lab_site: Lab, options: str, code: int, text: str
) -> None:
    done = lab_site.in_host("kpro7", ["sh", "-c", f"nvidia-smi {options}"])
    assert (done.returncode, done.stdout.decode()[: len(text)]) == (code, text)


def test_the_xml_is_well_formed_and_says_the_same(lab_site: Lab) -> None:
    lab_site.fault("kpro7", "gpu", "busy:1")
    log = ET.fromstring("\n".join(in_host(lab_site, "kpro7", "nvidia-smi -q -x")))  # noqa: S314
    assert log.findtext("attached_gpus") == "2"
    assert [gpu.findtext("uuid") for gpu in log.iter("gpu")] == [UUID.format(0), UUID.format(1)]
    assert [p.findtext("pid") for p in log.iter("process_info")] == ["31337"]


def test_gpu_json_may_be_replaced_at_any_time(lab_site: Lab) -> None:
    path = lab_site.state / "kpro7/shared/gpu.json"
    write_json(path, {"gpus": [{"name": "NVIDIA H200", "memory.total": 143771}]})
    query = "nvidia-smi --query-gpu=name,memory.free --format=csv,noheader"
    assert in_container(lab_site, "kpro7", query) == ["NVIDIA H200, 143770 MiB"]
    assert json.loads(path.read_text())["gpus"][0]["name"] == "NVIDIA H200"


def test_the_device_nodes_are_there_in_host_and_container(lab_site: Lab) -> None:
    nodes = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    assert in_host(lab_site, "kpro7", "ls /dev/nvidia*") == nodes
    assert in_container(lab_site, "kpro7", "ls /dev/nvidia*") == nodes
