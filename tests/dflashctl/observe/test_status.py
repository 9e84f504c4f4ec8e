"""The state of runs, from hand-made run directories with real processes."""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashctl.errors import PartialError, UnreachableError, UsageError
from dflashctl.inventory import Container, Host, Place
from dflashctl.operations.runs import list_runs
from dflashctl.operations.status import status
from dflashctl.run_status import RunStatus, find_run, find_running
from dflashctl.run_store import RunStore
from dflashctl.transport import Transport, way_to

MakeRun = Callable[[str], Any]


def only(place: Place, tag: str) -> RunStatus:
    (run,) = status([place], way_to, tag).runs
    return run


def reach_here_alone(host: Host) -> Transport:
    if host.name == "here":
        return way_to(host)
    raise UnreachableError("no route to host", place=host.name, hint="ping it")


def test_a_run_with_living_processes_is_running_with_its_figures(run: Any, here: Place) -> None:
    run.start()
    run.event("phase", phase="train")
    run.event("step", step=3, num_steps=9, loss=2.5)
    found = only(here, "fresh7")
    assert (found.state, found.run_id, found.place) == ("running", "id-fresh7", "here/self")
    assert found.step is not None
    assert (found.step["step"], found.step["loss"]) == (3, 2.5)
    assert found.phase is not None
    assert found.last_event_age_s is not None
    assert 0 <= found.last_event_age_s < 10


def test_it_is_running_while_either_of_its_two_processes_lives(run: Any, here: Place) -> None:
    run.start()
    run.children[0].kill()
    run.children[0].wait()
    assert only(here, "fresh7").state == "running"


@pytest.mark.parametrize(
    ("rc", "signal", "state", "failed"),
    [
        (0, None, "finished", False),
        (10, None, "stopped", False),
        (1, None, "failed", True),
        (2, None, "failed", True),
        (None, 9, "killed", True),
    ],
)
def test_exit_json_tells_how_it_ended(
    run: Any, here: Place, rc: int | None, signal: int | None, state: str, failed: bool
) -> None:
    run.start()
    run.end(rc, signal)
    found = only(here, "fresh7")
    assert (found.state, found.has_failed) == (state, failed)
    assert found.exit is not None
    assert found.exit["signal"] == signal


def test_processes_that_vanished_without_exit_json_are_a_lost_run(run: Any, here: Place) -> None:
    run.start()
    run.kill()
    assert only(here, "fresh7").state == "lost"


def test_a_zombie_is_not_alive(run: Any, here: Place) -> None:
    run.start()
    for child in run.children:
        child.kill()  # not waited for: both stay zombies of this process
    os.waitid(os.P_PID, run.children[1].pid, os.WEXITED | os.WNOWAIT)
    os.waitid(os.P_PID, run.children[0].pid, os.WEXITED | os.WNOWAIT)
    assert only(here, "fresh7").state == "lost"


def test_a_process_of_another_boot_is_not_alive(run: Any, here: Place) -> None:
    run.start()
    path = run.root / "process.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "another"}))
    assert only(here, "fresh7").state == "lost"


def test_a_run_without_process_json_never_started(run: Any, here: Place) -> None:
    assert only(here, "fresh7").state == "starting"
    old = run.root / "manifest.json"
    os.utime(old, (1_700_000_000, 1_700_000_000))
    assert only(here, "fresh7").state == "never-started"


def test_somebody_who_looks_at_the_lock_is_no_run(run: Any, here: Place) -> None:
    os.utime(run.root / "manifest.json", (1_700_000_000, 1_700_000_000))
    with (run.root / "run.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert only(here, "fresh7").state == "never-started"
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert only(here, "fresh7").state == "running"


def test_the_last_checkpoint_is_the_newest_complete_one(run: Any, here: Place) -> None:
    for name, complete in (
        ("step_00000100", 1),
        ("step_00000300.partial", 1),
        ("step_00000200", 0),
    ):
        directory = run.root / "checkpoints" / name
        directory.mkdir(parents=True)
        if complete:
            (directory / "COMPLETE.json").write_text("{}")
    assert only(here, "fresh7").last_checkpoint == "step_00000100"


def test_a_half_written_last_event_and_a_long_file_do_not_disturb(run: Any, here: Place) -> None:
    for number in range(3000):
        run.event("step", step=number, padding="x" * 100)
    with run.metrics.open("ab") as stream:
        stream.write(b'{"v": 1, "kind": "step", "st')
    found = only(here, "fresh7")
    assert found.step is not None
    assert found.step["step"] == 2999


def test_all_runs_of_a_container_come_in_one_round_trip(make_run: MakeRun, here: Place) -> None:
    for tag in ("fresh1", "fresh2", "other1"):
        make_run(tag)
    opened: list[Transport] = []

    def counting(host: Host) -> Transport:
        opened.append(way_to(host))
        return opened[-1]

    found = status([here], counting)
    assert [run.tag for run in found.runs] == ["fresh1", "fresh2", "other1"]
    assert [transport.round_trips for transport in opened] == [1]


def test_a_tag_that_no_container_has_is_an_error_that_names_them(here: Place) -> None:
    with pytest.raises(UsageError, match="no run fresh8 in here/self"):
        status([here], way_to, "fresh8")


def other_host(name: str) -> Place:
    container = Container(name, 200)
    return Place(Host(name, name, containers=(container,)), container)


def test_a_host_without_answer_does_not_hide_the_others(run: Any, here: Place) -> None:
    run.start()
    found = status([other_host("kpro6"), here], reach_here_alone)
    assert [run.tag for run in found.runs] == ["fresh7"]
    (failure,) = found.failures
    assert (failure.place, failure.exit_code, failure.hint) == ("kpro6/200", 4, "ping it")


def test_a_run_is_found_among_several_containers(
    make_run: MakeRun, here: Place, tmp_path: Path
) -> None:
    make_run("fresh7").start()
    empty_container = replace(here.container, host_name="empty", workspace=str(tmp_path / "empty"))
    empty = Place(replace(here.host, name="empty"), empty_container)
    assert find_run([empty, here], way_to, "fresh7") == here
    assert find_running([empty, here], way_to) == (here, "fresh7")
    with pytest.raises(UsageError, match="no container has a run fresh8"):
        find_run([empty, here], way_to, "fresh8")
    make_run("fresh9").start()
    with pytest.raises(UsageError, match="fresh7 on here/self, fresh9 on here/self"):
        find_running([empty, here], way_to)


def test_a_run_that_may_be_on_a_silent_host_is_not_said_to_be_missing(here: Place) -> None:
    with pytest.raises(PartialError, match="kpro6/200: no route to host"):
        find_run([other_host("kpro6"), here], reach_here_alone, "fresh7")


def record(store: RunStore, run: Any, **changes: Any) -> None:
    directory = store.root / run.tag
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps(run.manifest | changes))


def test_the_list_merges_records_with_what_containers_hold(
    make_run: MakeRun, here: Place, tmp_path: Path
) -> None:
    store = RunStore(tmp_path / "records")
    both, there, removed, remade = (make_run(tag) for tag in ("both", "there", "gone1", "remade"))
    record(store, both, created_unix_s=1.0)
    record(store, removed, created_unix_s=2.0)
    record(store, remade, run_id="the one before", created_unix_s=3.0)
    both.end(0)
    there.start()
    removed.root.rename(tmp_path / "away")
    (store.root / "broken").mkdir()
    (store.root / "broken" / "manifest.json").write_text("{")
    rows = list_runs(store, [here], way_to).runs
    assert [(row.tag, row.state, row.here) for row in rows] == [
        ("broken", "unreadable", "record"),
        ("both", "finished", "record"),
        ("gone1", "gone", "record"),
        ("remade", "gone", "record"),
        ("remade", "starting", ""),
        ("there", "running", ""),
    ]


def test_the_local_list_asks_nobody(make_run: MakeRun, here: Place, tmp_path: Path) -> None:
    store = RunStore(tmp_path / "records")
    record(store, make_run("fresh7"))
    (store.root / "fresh7" / "exit.json").write_text("{}")
    (row,) = list_runs(store, [here], None).runs
    assert (row.state, row.here, row.place) == ("unknown", "pulled", "here/self")
