"""remote/gpus.py as a process: locks in a directory of the test, and a canned nvidia-smi."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl import remote
from dflashctl.gpu_locks import Holder, Lock
from dflashctl.gpu_roles import Claim, Ways
from dflashctl.inventory import Container, Host, Place
from dflashctl.transport.local import LocalTransport
from tests.dflashctl.act.conftest import wait_until

# F35: a query of everything (-q) crashes this one as some drivers do.
SMI = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in
    *-q\\ *|*\\ -q*) exit 139;;
    *query-gpu*) {rows};;
esac
"""
ROWS = r"printf '%s\n' '0, GPU-a, X, 1, 9000, 0, 0, 0:1.0' '1, GPU-b, X, 1, 9000, 0, 0, 0:2.0'"
SLEEP = "import time; time.sleep(600)"


class Node:
    """A machine with two GPUs, as far as nvidia-smi and the lock directory tell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "locks"
        self.calls = root / "calls"
        self.limit_s = 10.0
        self.smi(ROWS)

    def smi(self, rows: str) -> None:
        tools = self.root / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "nvidia-smi").write_text(SMI.format(calls=self.calls, rows=rows))
        (tools / "nvidia-smi").chmod(0o755)

    def start(self, action: str, **arguments: Any) -> subprocess.Popen[str]:
        order = {"action": action, "directory": str(self.directory), "limit_s": self.limit_s}
        argv = [sys.executable, "-I", "-S", "-c", remote.program("gpus")]
        path = f"{self.root}/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            [*argv, json.dumps(order | arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PATH": path},
        )

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        with self.start(action, **arguments) as process:
            out, err = process.communicate(timeout=100)
        assert err == ""
        answer: dict[str, Any] = json.loads(out)
        return answer

    def claim(self, tag: str, *wanted: str, **extra: Any) -> dict[str, Any]:
        taken: dict[str, Any] = self.ask("claim", wanted=wanted, claim=self.wish(tag, **extra))
        return dict(taken["claim"])

    def wish(self, tag: str, **extra: Any) -> dict[str, Any]:
        run = {"token": f"token-{tag}", "vmid": None, "run_dir": f"{self.root}/runs/{tag}"}
        named = {"tag": tag, "host": "here", "by": "me@laptop", "lease_s": 600.0}
        return run | named | extra

    def states(self) -> dict[str, tuple[str, str]]:
        locks = [Lock.of(raw) for raw in self.ask("list")["locks"]]
        return {lock.uuid: (lock.tag, lock.state) for lock in locks}

    def change(self, uuid: str, **values: Any) -> None:
        path = self.directory / uuid / "holder.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def run_process(node: Node) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a process that has a run's directory on its command line."""
    started: list[subprocess.Popen[bytes]] = []

    def start(tag: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", SLEEP, "--run-dir", f"{node.root}/runs/{tag}"]
        started.append(subprocess.Popen(argv))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_card_of_both_roles_is_locked_once_whatever_names_it_has(node: Node) -> None:
    for wanted in (("0", "0"), ("0", "GPU-a"), ("GPU-a", "GPU-b", "0")):
        taken = node.claim("a", *wanted)
        assert (taken["conflicts"], taken["uuids"]) == ([], sorted({"GPU-a", *wanted} - {"0"}))
        assert node.states()["GPU-a"] == ("a", "starting")
    assert node.ask("claim", wanted=["0", "7"], claim=node.wish("a"))["claim"] is None


def test_all_of_the_locks_are_taken_or_none_and_the_holder_is_named(node: Node) -> None:  # F41
    taken = node.claim("a", "1")
    assert (taken["conflicts"], taken["taken_over"], taken["uuids"]) == ([], [], ["GPU-b"])
    refused = node.claim("b", "0", "GPU-b")
    (holder,) = [Lock.of(raw) for raw in refused["conflicts"]]
    assert (holder.uuid, holder.tag, holder.by, holder.state) == (
        "GPU-b",
        "a",
        "me@laptop",
        "starting",
    )
    assert holder.text().startswith("run a of me@laptop (here/self), since 20")
    assert node.states() == {"GPU-b": ("a", "starting")}, "GPU-a was not taken alone"
    assert node.ask("claim", wanted=["7"], claim=node.wish("c"))["claim"] is None
    words = node.calls.read_text().split()
    assert "-q" not in words


def test_of_two_that_claim_at_once_exactly_one_wins_every_time(node: Node) -> None:  # F41
    winners = []
    for _ in range(5):
        pair = [node.start("claim", wanted=["0", "1"], claim=node.wish(tag)) for tag in "ab"]
        answers = [json.loads(process.communicate(timeout=100)[0])["claim"] for process in pair]
        won = [tag for tag, claim in zip("ab", answers, strict=True) if not claim["conflicts"]]
        assert len(won) == 1, answers
        winners += won
        told = [raw["tag"] for claim in answers for raw in claim["conflicts"]]
        assert set(told) == set(won)
        assert node.states() == dict.fromkeys(("GPU-a", "GPU-b"), (won[0], "starting"))
        node.ask("release", run=node.wish(won[0]))
        assert node.states() == {}
    assert len(winners) == 5


def test_a_lock_lives_with_its_run_and_is_taken_over_by_proof_of_its_end(
    node: Node, run_process: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    node.claim("a", "0")
    process = run_process("a")
    wait_until(lambda: node.ask("bind", run=node.wish("a"))["pid"] == process.pid)
    assert node.claim("b", "0")["conflicts"][0]["why"] == f"its process {process.pid} lives"
    assert node.ask("release", run=node.wish("a"))["released"] == [], "it lives"
    assert node.ask("clear", select="a", force=False)["refused"][0]["state"] == "live"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert node.states() == {"GPU-a": ("a", "stale")}
    (over,) = node.claim("b", "0")["taken_over"]
    assert (over["tag"], over["why"]) == ("a", f"its process {process.pid} has ended")
    assert node.states() == {"GPU-a": ("b", "starting")}


def test_a_restart_an_expired_lease_and_a_half_made_lock_are_proof_and_less_is_not(
    node: Node,
) -> None:
    node.claim("a", "0", "1")
    assert node.states() == dict.fromkeys(("GPU-a", "GPU-b"), ("a", "starting"))
    node.change("GPU-a", boot_id="another")
    node.change("GPU-b", lease_until_s=0.0)
    why = {raw["uuid"]: raw["why"] for raw in node.ask("list")["locks"]}
    assert why == {
        "GPU-a": "the machine was restarted since",
        "GPU-b": "its launch ended without a start (lease over, no process)",
    }
    assert len(node.claim("b", "0", "1")["taken_over"]) == 2
    (node.directory / "GPU-a/holder.json").unlink()
    assert node.states()["GPU-a"] == ("?", "stale")
    assert [raw["why"] for raw in node.claim("c", "0")["taken_over"]] == ["it was left half made"]


def test_a_rerun_takes_its_own_locks_again_and_a_stranger_does_not(node: Node) -> None:
    node.claim("a", "0")
    again = node.claim("a", "0", "1")
    assert (again["conflicts"], again["taken_over"]) == ([], [])
    (held,) = node.claim("a", "0", token="of another laptop")["conflicts"]
    assert held["token"] == "token-a"  # noqa: S105 - made up
    run = node.wish("a")
    kept = node.ask("release", run=run | {"token": None})["kept"]
    assert len(kept) == 2, "without its token a launch under way keeps its locks: it may be one"
    assert len(node.ask("release", run=run)["released"]) == 2


def test_clear_removes_by_tag_or_uuid_and_a_living_one_only_by_force(node: Node) -> None:
    node.claim("a", "0", "1")
    assert len(node.ask("clear", select="a", force=False)["refused"]) == 2
    assert [c["uuid"] for c in node.ask("clear", select="GPU-a", force=True)["cleared"]] == [
        "GPU-a"
    ]
    node.change("GPU-b", lease_until_s=0.0)
    assert len(node.ask("clear", select="a", force=False)["cleared"]) == 1
    assert node.ask("clear", select="a", force=False) == {"cleared": [], "refused": [], "locks": []}


def test_a_look_leaves_nothing_behind_and_a_claim_makes_a_sticky_directory(node: Node) -> None:
    assert node.ask("look")["locks"] == []
    assert node.ask("release", run=node.wish("a"))["released"] == []
    assert not node.directory.exists()
    node.claim("a", "0")
    assert node.directory.stat().st_mode & 0o7777 == 0o1777


def test_a_driver_that_ignores_signals_is_left_and_the_next_ask_starts_no_other(
    node: Node,
) -> None:  # F34
    node.limit_s = 2.0
    node.smi("trap '' TERM; sleep 600")
    assert node.ask("look")["gpus"]["rc"] is None
    assert len(node.calls.read_text().splitlines()) == 1, "no second query behind the first"
    # A process in state D cannot be made here; one that is noted as stuck and lives stands for it.
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as stuck:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{stuck.pid}/stat").read_text().rpartition(")")[2].split()
        note = {"pid": stuck.pid, "ticks": int(stat[19]), "boot": boot}
        node.directory.mkdir(exist_ok=True)
        (node.directory / ".stuck.json").write_text(json.dumps(note))
        answer = node.ask("look")
        assert (answer["gpus"]["rc"], answer["stuck"]["pid"]) == (None, stuck.pid)
        assert len(node.calls.read_text().splitlines()) == 1, "it was not started again"
        stuck.kill()
    node.smi(ROWS)
    node.limit_s = 10.0
    assert len(node.ask("look")["gpus"]["rows"]) == 2, "its end is seen"


def test_a_run_that_begins_while_the_driver_is_asked_is_not_told_to_have_ended(node: Node) -> None:
    node.claim("a", "0")
    holder, begun = node.directory / "GPU-a/holder.json", node.root / "begun"
    run = f"{sys.executable} -c '{SLEEP}' --run-dir {node.root}/runs/a"
    bind = f'sed -i "s/\\"pid\\": null/\\"pid\\": $!/" {holder}; echo $! >{begun}'
    node.smi(f"[ -e {begun} ] || {{ {run} >/dev/null 2>&1 & {bind}; }}; {ROWS}")
    try:
        (lock,) = node.ask("look")["locks"]
        assert (lock["state"], lock["pid"]) == ("live", int(begun.read_text()))
    finally:
        os.kill(int(begun.read_text()), signal.SIGKILL)


def test_a_slow_driver_is_waited_for(node: Node) -> None:  # F43
    node.smi(f"sleep 2.5; {ROWS}")
    assert len(node.ask("look")["gpus"]["rows"]) == 2


@pytest.mark.lab
def test_locks_taken_in_a_container_are_known_to_hold_off_nobody_outside(tmp_path: Path) -> None:
    node = Node(tmp_path)
    here_too = str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]"
    assert node.claim("x", "0")["confined"] is here_too
    order = {"action": "claim", "wanted": ["1"], "claim": node.wish("y")}
    order |= {"directory": str(tmp_path / "inside")}
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*unshare, sys.executable, "-I", "-S", "-c", remote.program("gpus"), json.dumps(order)],
        env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        timeout=100,
    )
    assert json.loads(done.stdout)["claim"]["confined"] is True
    here = LocalTransport("box")
    place = Place(Host("box", "box", backend="local"), Container("box", None))
    claim = Claim(Ways(place, here, here), Holder("y", "box", None, "/w/runs/y", "token"))
    assert claim.warning == ""
    claim.took(["GPU-b"], (), is_confined=True)
    assert "box is itself a container: its GPU locks are not seen" in claim.warning
    through_node = Claim(Ways(place, here, here), Holder("y", "box", 200, "/w/runs/y", "token"))
    through_node.took(["GPU-b"], (), is_confined=True)  # a node may be a container of its own
    assert through_node.warning == ""
