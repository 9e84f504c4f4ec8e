"""exit.json, process.json, and the isolation of the contract."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.contract.errors import ManifestError
from trainer.contract.exit_record import ExitRecord, TrainerExit, classify
from trainer.contract.process_record import ProcessRecord, boot_id, start_ticks

EXIT = ExitRecord("r", "killed", None, 9, 1.0, 2.0, 40, "step_00000040", oom_kill=True, error="e")


def test_exit_record_survives_its_own_text() -> None:
    assert ExitRecord.from_json(EXIT.to_json()) == EXIT


def test_exit_record_skips_unknown_keys_and_needs_no_error() -> None:
    raw = json.loads(EXIT.to_json()) | {"weather": "fine"}
    del raw["error"]
    assert ExitRecord.from_json(json.dumps(raw)).error is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not readable"),
        ("{}", "not readable: 'v'"),
        ('{"v": 1}', "not readable"),
        ('{"v": 2}', "version 2, this reader knows 1"),
        ("[]", "not readable"),
    ],
)
def test_exit_record_that_is_not_whole_is_refused(text: str, told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        ExitRecord.from_json(text)


@pytest.mark.parametrize(
    ("rc", "number", "state"),
    [
        (0, None, "finished"),
        (10, None, "stopped"),
        (1, None, "failed"),
        (2, None, "failed"),
        (77, None, "failed"),
        (None, 9, "killed"),
    ],
)
def test_status_and_signal_name_the_state(rc: int | None, number: int | None, state: str) -> None:
    assert classify(rc, number) == state


def test_exit_statuses_of_the_trainer_are_fixed() -> None:
    assert [int(status) for status in TrainerExit] == [0, 1, 2, 7, 10]


def _record(pid: int, ticks: int, **values: object) -> ProcessRecord:
    facts = {
        "run_id": "r",
        "runner_pid": 2**22 + 1,  # above every pid
        "runner_start_ticks": 1,
        "trainer_pid": pid,
        "trainer_start_ticks": ticks,
        "pgid": pid,
        "boot_id": boot_id(),
        "started_unix_s": 1.0,
    }
    return ProcessRecord(**(facts | values))  # type: ignore[arg-type]


def test_process_is_alive_with_its_own_start_ticks_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        ticks = start_ticks(child.pid)
        assert _record(child.pid, ticks).alive()
        assert not _record(child.pid, ticks + 1).alive()
        assert not _record(child.pid, ticks, boot_id="another boot").alive()
        as_runner = {"runner_pid": child.pid, "runner_start_ticks": ticks}
        assert _record(2**22 + 2, 1, **as_runner).alive()
        child.kill()
        stat = Path(f"/proc/{child.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert not _record(child.pid, ticks).alive()  # a zombie
    finally:
        child.kill()
        child.communicate()
    assert not _record(child.pid, ticks).alive()
    with pytest.raises(OSError, match="No such"):
        start_ticks(child.pid)


def test_name_of_a_process_may_hold_parentheses_and_spaces() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert _record(child.pid, start_ticks(child.pid)).alive()
    child.communicate(b"\n")


def test_process_record_survives_its_own_text() -> None:
    record = _record(5, 6)
    assert ProcessRecord.from_json(record.to_json()) == record
    more = json.loads(record.to_json()) | {"mood": "good"}
    assert ProcessRecord.from_json(json.dumps(more)) == record


@pytest.mark.parametrize(
    ("text", "told"), [("", "not readable"), ("{}", "not readable"), ('{"v": 9}', "version 9")]
)
def test_process_record_that_is_not_whole_is_refused(text: str, told: str) -> None:
    with pytest.raises(ManifestError, match=told):
        ProcessRecord.from_json(text)


def test_contract_is_importable_without_site_packages_and_loads_the_library_alone() -> None:
    root = Path(__file__).resolve().parents[2]
    names = sorted(p.stem for p in (root / "trainer" / "contract").glob("[a-z]*.py"))
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        + "".join(f"import trainer.contract.{name}\n" for name in names)
        + "tops = {n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names\n"
        "print(sorted(tops - {'trainer', '__main__'}), sorted(n for n in sys.modules"
        " if n.startswith('trainer.') and not n.startswith('trainer.contract')))"
    )
    argv = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[] []"
    assert len(names) >= 9
