"""Observing through SSH and pct exec, on the look-alike site with its faults."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflashctl
from dflashctl.errors import ContainerDownError, StateUnknownError, UnreachableError
from dflashctl.event_stream import Backoff, Ended, Follow, Item, LogBytes, Notice, RunEvent, follow
from dflashctl.inventory import Inventory, Place, load_inventory
from dflashctl.lab.site import Lab
from dflashctl.operations.pull import PullRequest, pull
from dflashctl.operations.status import status
from dflashctl.transport import connect, way_to
from trainer.contract.completion import digest_file

pytestmark = [pytest.mark.lab, pytest.mark.slow]

QUICK = Backoff(first_s=0.1, limit_s=0.5, down_s=1.0)
REPOSITORY = Path(dflashctl.__file__).resolve().parents[1]

# Runs in the container: a run whose "trainer" writes lines and events for some seconds, or until
# there is a file "enough" beside its log.
RUN = """
import json, os, sys, time
tag, seconds = sys.argv[1], float(sys.argv[2])
root = f"/workspace/runs/{tag}"
os.makedirs(root)
log_path = f"{root}/train_stdout_{tag}.log"
json.dump({"run_id": "r", "log_path": log_path}, open(f"{root}/manifest.json", "w"))
if os.fork():
    sys.exit(0)
os.setsid()
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
me = {"runner_pid": os.getpid(), "runner_start_ticks": ticks, "boot_id": boot}
json.dump(me, open(f"{root}/process.json", "w"))
for fd in (0, 1, 2):
    os.dup2(os.open("/dev/null", os.O_RDWR), fd)
log, metrics = open(log_path, "ab", 0), open(f"{root}/metrics.jsonl", "ab", 0)
end, number = time.monotonic() + seconds, 0
while time.monotonic() < end and not os.path.exists(f"{root}/enough"):
    number += 1
    line = b"line %d of the log\\n" % number
    log.write(line[:7]); log.write(line[7:])
    head = {"v": 1, "seq": number, "t_unix_s": time.time(), "run_id": "r", "kind": "step"}
    metrics.write(json.dumps(head | {"step": number}).encode() + b"\\n")
    time.sleep(0.005)
record = {"v": 1, "run_id": "r", "state": "finished", "rc": 0, "signal": None,
    "started_unix_s": 1.0, "ended_unix_s": 2.0, "last_step": number, "last_checkpoint": None,
    "oom_kill": False}
json.dump(record, open(f"{root}/.exit", "w"))
os.rename(f"{root}/.exit", f"{root}/exit.json")
"""


@pytest.fixture(scope="module")
def inventory(lab_site: Lab, tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    file: Path = tmp_path_factory.mktemp("lab") / "hosts.yaml"
    file.write_text(lab_site.hosts_yaml())
    return load_inventory(file)


@pytest.fixture(params=["fabric", "openssh"])
def place(request: pytest.FixtureRequest, inventory: Inventory) -> Place:
    """Container 200 of kpro6, by each backend."""
    return of_backend(inventory, request.param)


def of_backend(inventory: Inventory, backend: Any) -> Place:
    found = inventory.one(["kpro6/200"])
    return dataclasses.replace(found, host=dataclasses.replace(found.host, backend=backend))


@pytest.fixture
def start_run(lab_site: Lab) -> Callable[[str, float], str]:
    """Start the run TAG for some seconds in kpro6/200 and return its directory."""

    def start(tag: str, seconds: float) -> str:
        script = f"rm -rf /workspace/runs/{tag}; python3 - {tag} {seconds}"
        done = lab_site.in_container("kpro6", 200, script, stdin=RUN.encode())
        assert done.returncode == 0, done.stderr
        return f"/workspace/runs/{tag}"

    return start


def wait_for(lab_site: Lab, file: str) -> None:
    script = f"while ! [ -s {file} ]; do sleep 0.05; done"
    assert lab_site.in_container("kpro6", 200, script).returncode == 0


class Watcher(threading.Thread):
    """Follows a run in the background."""

    def __init__(self, place: Place, root: str) -> None:
        super().__init__()
        self.items: list[Item] = []
        self.failure: Exception | None = None
        self._place = place
        self._what = Follow(root, f"train_stdout_{Path(root).name}.log")
        self.start()

    def run(self) -> None:
        try:
            follow(lambda: connect(self._place), self._what, self.items.append, backoff=QUICK)
        except ContainerDownError as error:
            self.failure = error

    def of(self, kind: type) -> list[Any]:
        return [item for item in list(self.items) if isinstance(item, kind)]

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        end_s = time.monotonic() + within_s
        while not condition():
            assert self.is_alive()
            assert time.monotonic() < end_s, "it did not happen in time"
            time.sleep(0.02)

    def check_every_line_once(self, lab_site: Lab) -> None:
        lab_site.in_container("kpro6", 200, f"touch {self._what.root}/enough")
        self.join(timeout=60)
        (ended,) = self.of(Ended)
        last = ended.record.last_step
        lines = b"".join(item.data for item in self.of(LogBytes)).splitlines()
        assert lines == [b"line %d of the log" % n for n in range(1, last + 1)]
        assert [item.event["step"] for item in self.of(RunEvent)] == list(range(1, last + 1))


@pytest.mark.timeout(120)
def test_every_line_comes_once_although_sshd_is_killed_three_times(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str]
) -> None:
    watcher = Watcher(place, start_run("sshd", 100.0))
    for number in (1, 2, 3):
        seen = len(watcher.of(LogBytes))
        watcher.until(lambda seen=seen: len(watcher.of(LogBytes)) > seen + 5)
        lab_site.fault("kpro6", "sshd_kill", "1")
        watcher.until(
            lambda number=number: (
                [item.kind for item in watcher.of(Notice)].count("connected") >= number
            )
        )
    watcher.check_every_line_once(lab_site)


@pytest.mark.timeout(120)
def test_every_line_comes_once_although_the_network_is_cut(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str]
) -> None:
    watcher = Watcher(place, start_run("cut", 100.0))
    watcher.until(lambda: len(watcher.of(LogBytes)) > 5)
    lab_site.fault("kpro6", "net", "cut")
    watcher.until(lambda: len(watcher.of(Notice)) >= 3)
    lab_site.fault("kpro6", "net", "off")
    watcher.check_every_line_once(lab_site)
    assert {item.kind for item in watcher.of(Notice)} == {"disconnected", "connected"}


@pytest.mark.timeout(120)
def test_a_link_that_is_silent_is_given_up_and_goes_on_at_the_next_byte(
    lab_site: Lab, inventory: Inventory, start_run: Callable[[str, float], str]
) -> None:
    watcher = Watcher(of_backend(inventory, "fabric"), start_run("stall", 100.0))
    watcher.until(lambda: len(watcher.of(LogBytes)) > 5)
    lab_site.fault("kpro6", "net", "stall")
    watcher.until(lambda: watcher.of(Notice))
    lab_site.fault("kpro6", "net", "off")
    watcher.until(lambda: "connected" in [item.kind for item in watcher.of(Notice)])
    watcher.check_every_line_once(lab_site)


@pytest.mark.timeout(120)
def test_a_container_that_stops_under_the_watcher_ends_it_with_that_reason(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str]
) -> None:
    watcher = Watcher(place, start_run("down", 60.0))
    watcher.until(lambda: len(watcher.of(LogBytes)) > 5)
    lab_site.in_host("kpro6", ["pct", "stop", "200"])
    watcher.join(timeout=60)
    assert isinstance(watcher.failure, ContainerDownError)


def followers(lab_site: Lab) -> int:
    # The brackets keep the search from finding itself.
    script = 'grep -l \'"star[t]": {"log\' /proc/[0-9]*/cmdline 2>/dev/null'
    return len(lab_site.in_container("kpro6", 200, script).stdout.splitlines())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["fabric", "openssh"])
def test_a_watch_that_is_killed_leaves_no_follow_program_in_the_container(
    lab_site: Lab, tmp_path: Path, start_run: Callable[[str, float], str], backend: str
) -> None:
    start_run("orphan", 50.0)
    hosts = lab_site.hosts_yaml().replace("    port:", f"    backend: {backend}\n    port:")
    (tmp_path / "hosts.yaml").write_text(hosts)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "dflashctl", "watch", "orphan", "-l", "kpro6/200"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while followers(lab_site) == 0:
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    while followers(lab_site) > 0:
        time.sleep(0.1)  # the time limit of the test ends this


def test_status_of_all_runs_of_a_container_is_one_pct_call_and_knows_its_clock(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str]
) -> None:
    wait_for(lab_site, start_run("one", 60.0) + "/metrics.jsonl")
    wait_for(lab_site, start_run("two", 0.1) + "/exit.json")
    lab_site.fault("kpro6", "latency", "0,0")
    before = len(lab_site.pct_calls("kpro6"))
    found = status([place], way_to)
    assert len(lab_site.pct_calls("kpro6")) == before + 1
    states = {run.tag: run for run in found.runs}
    assert (states["one"].state, states["two"].state) == ("running", "finished")
    age_s = states["one"].last_event_age_s
    assert age_s is not None
    assert age_s < 5


def test_the_containers_of_a_host_are_asked_at_once_over_one_connection(
    lab_site: Lab, inventory: Inventory, place: Place
) -> None:
    other = next(p for p in inventory.select(["kpro6"]) if p.container.vmid == 201)
    places = [place, dataclasses.replace(other, host=place.host)]
    lab_site.fault("kpro6", "latency", "5,5")
    calls, logins = len(lab_site.pct_calls("kpro6")), accepted(lab_site)
    found = status(places, way_to)
    began_s = [float(line.split()[0]) for line in lab_site.pct_calls("kpro6")[calls:]]
    assert len(began_s) == 2
    assert abs(began_s[1] - began_s[0]) < 5.0  # one after the other they are 5 s apart or more
    assert accepted(lab_site) - logins <= 1  # openssh may have one from before
    (failure,) = found.failures  # it is stopped
    assert (failure.place, failure.exit_code) == ("kpro6/201", 4)


def accepted(lab_site: Lab) -> int:
    """Return how many logins the sshd of kpro6 has accepted so far."""
    done = lab_site.in_host("kpro6", ["grep", "-c", "Accepted publickey", "/var/log/sshd.log"])
    return int(done.stdout)


def test_pull_through_pct_brings_the_bytes_that_are_there(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str], tmp_path: Path
) -> None:
    root = start_run("bring", 0.2)
    script = f"mkdir {root}/export; head -c 3000000 /dev/urandom >{root}/export/model.safetensors"
    lab_site.in_container("kpro6", 200, script)
    wait_for(lab_site, f"{root}/exit.json")
    result = pull(PullRequest(place, "bring", ("logs", "export"), tmp_path / "bring"), connect)
    for name in ("export/model.safetensors", "train_stdout_bring.log", "exit.json"):
        assert name in result.received
        there = lab_site.in_container("kpro6", 200, f"cat {root}/{name}").stdout
        assert (tmp_path / "bring" / name).read_bytes() == there


@pytest.mark.timeout(120)
def test_a_pull_whose_link_is_cut_says_how_to_go_on_and_does(
    lab_site: Lab, place: Place, start_run: Callable[[str, float], str], tmp_path: Path
) -> None:
    root = start_run("bigpull", 0.2)
    weights = f"{root}/export/weights"
    script = f"mkdir {root}/export; head -c 150000000 /dev/urandom >{weights}; sha256sum {weights}"
    digest = lab_site.in_container("kpro6", 200, script).stdout.split()[0].decode()
    request = PullRequest(place, "bigpull", ("export",), tmp_path / "bigpull")
    num_bytes = 0

    def cut_in_the_middle(size: int) -> None:
        nonlocal num_bytes
        before, num_bytes = num_bytes, num_bytes + size
        if before < 50_000_000 <= num_bytes:
            lab_site.fault("kpro6", "sshd_kill", "1")

    with pytest.raises((UnreachableError, StateUnknownError)) as caught:
        pull(request, connect, cut_in_the_middle)
    assert "dflashctl pull bigpull" in caught.value.hint
    assert not (tmp_path / "bigpull" / "export").exists()
    pull(request, connect)
    assert digest_file(tmp_path / "bigpull" / "export" / "weights") == digest


def test_a_pull_from_a_stopped_container_says_how_to_start_it(
    inventory: Inventory, tmp_path: Path
) -> None:
    stopped = inventory.one(["kpro6/201"])
    request = PullRequest(stopped, "x", ("logs",), tmp_path / "x")
    with pytest.raises(ContainerDownError) as caught:
        pull(request, connect)
    assert "pct start 201" in caught.value.hint
    assert not (tmp_path / "x").exists()
