"""docs/json.md against the documents themselves: no key of the one without the other."""

import json
import re
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from dflashctl.diagnosis import Check
from dflashctl.event_stream import Ended, Notice, RunEvent
from dflashctl.gpu_locks import Lock
from dflashctl.lab.site import SiteStatus
from dflashctl.operations.check import CheckResult
from dflashctl.operations.data_doctor import DoctorResult
from dflashctl.operations.deploy import DeployResult
from dflashctl.operations.evaluate import EvaluateResult
from dflashctl.operations.export import ExportResult
from dflashctl.operations.gc import GcOutcome, GcPlan, GcResult
from dflashctl.operations.gpus import HostGpus
from dflashctl.operations.init import InitResult
from dflashctl.operations.launch import LaunchResult
from dflashctl.operations.locks import HostLock, LocksResult
from dflashctl.operations.pull import PullResult
from dflashctl.operations.push import PushResult
from dflashctl.operations.runs import RunList
from dflashctl.operations.stop import StopResult
from dflashctl.operations.warmup import WarmupResult
from dflashctl.render.failure import SCHEMA
from dflashctl.render.gpus import locks_document
from dflashctl.render.plain import stream_line
from dflashctl.render.receipts import doctor_document, stop_document
from dflashctl.render.retention import gc_document
from dflashctl.run_status import PlaceFailure, RunStatus, Statuses
from tests.dflashctl.act.conftest import REPOSITORY, Project
from trainer.contract.exit_record import ExitRecord
from trainer.contract.manifest import Manifest
from trainer.contract.process_record import ProcessRecord
from trainer.doctor.findings import Finding
from trainer.doctor.report import Report

ROW = re.compile(r"^\| `(\S+)` \| ([^|]+) \|", re.MULTILINE)
MARK = "0123abcd"  # what tells the locks of one launch from those of another
LOCK = Lock("GPU-a", "x", "here", None, "/w", "me", "b", 0.0, None, "stale", "gone", token=MARK)
RESULTS: list[tuple[str, str, type]] = [
    ("init", "", InitResult),
    ("deploy", "places[]", DeployResult),
    ("push", "", PushResult),
    ("gpus", "hosts[]", HostGpus),
    ("check", "", CheckResult),
    ("warmup", "", WarmupResult),
    ("launch", "", LaunchResult),
    ("status", "", Statuses),
    ("runs list", "", RunList),
    ("stop", "", StopResult),
    ("evaluate", "", EvaluateResult),
    ("export", "", ExportResult),
    ("pull", "", PullResult),
    ("doctor", "checks[]", Check),
    ("lab status", "", SiteStatus),
    ("error", "", PlaceFailure),
    ("run", "", RunStatus),
    ("exit", "", ExitRecord),
    ("process", "", ProcessRecord),
    ("lock", "", Lock),
    ("manifest", "", Manifest),
]


def _sections() -> dict[str, dict[str, str]]:
    """Return path and type of every key, by the heading above them."""
    text = (REPOSITORY / "docs" / "json.md").read_text()
    found = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        found[title.replace("`", "")] = dict(ROW.findall(body))
    return found


SECTIONS = _sections()


def documented(title: str) -> set[str]:
    """Return the paths of a section, with those of the shapes that it refers to."""
    paths: set[str] = set()
    for path, kind in SECTIONS[title].items():
        shape = re.match(r"\[(\w+)\]\(#\1\)", kind)
        paths |= {f"{path}.{inner}" for inner in documented(shape[1])} if shape else {path}
    return paths


def paths_of(value: Any, known: set[str], path: str = "") -> set[str]:
    """Return the paths of a document down to what is documented as one thing."""
    if path in known or not isinstance(value, dict | list) or not value:
        return {path}
    if isinstance(value, list):
        return set().union(*(paths_of(inner, known, f"{path}[]") for inner in value))
    inside = (paths_of(inner, known, f"{path}.{key}".lstrip(".")) for key, inner in value.items())
    return set().union(*inside)


def fields_of(kind: Any, path: str) -> set[str]:
    """Return the paths that the document of a result class has."""
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        return set().union(*(fields_of(hint, f"{path}.{name}".lstrip(".")) for name, hint in hints))
    inner = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) is tuple and is_dataclass(inner[0]):
        return fields_of(inner[0], f"{path}[]")
    if get_origin(kind) is UnionType and len(inner) == 1:
        return fields_of(inner[0], path)
    return {path}


def differences(known: set[str], found: set[str]) -> dict[str, list[str]]:
    """Return what only one side has; what is null or empty says nothing of the keys inside."""

    def inside(path: str, of: str) -> bool:
        return path.startswith((f"{of}.", f"{of}["))

    return {
        "not documented": sorted(
            path for path in found - known if not any(inside(one, path) for one in known)
        ),
        "not there": sorted(
            path for path in known - found if not any(inside(path, one) for one in found)
        ),
    }


NOTHING: dict[str, list[str]] = {"not documented": [], "not there": []}


def differs(title: str, document: dict[str, Any]) -> dict[str, list[str]]:
    """Compare a document with its section; schema and ok are in every one."""
    body = dict(document)
    assert body.pop("schema") == SCHEMA
    assert isinstance(body.pop("ok"), bool)
    known = documented(title)
    return differences(known, paths_of(body, known))


@pytest.mark.parametrize(
    ("title", "prefix", "kind"), RESULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_field_of_a_result_is_documented_and_nothing_else(
    title: str, prefix: str, kind: type
) -> None:
    found = {path for path in fields_of(kind, prefix) if path.rpartition(".")[2] != "token"}
    known = {path for path in documented(title) if path.startswith(prefix)}
    assert differences(known, found) == NOTHING


def test_a_key_that_only_one_side_has_is_found() -> None:
    known = {"a", "b[].c", "b[].d", "e.f"}
    document = {"a": 1, "b": [{"c": 1}, {"x": 2}], "e": None}
    assert differences(known, paths_of(document, known)) == {
        "not documented": ["b[].x"],
        "not there": ["b[].d"],
    }


def test_documents_that_are_no_dataclass_are_as_documented() -> None:
    ended = ExitRecord("r", "stopped", 10, None, 0.0, 1.0, 5, "step_5", oom_kill=False)
    items = [RunEvent({"kind": "step"}), Notice("connected", "again"), Ended("stopped", ended)]
    for item in items:
        line = json.loads(stream_line(item) or "")
        assert differs(f"watch {line['type']}", line) == NOTHING
    head = {"schema": SCHEMA, "ok": True}
    report = Report(findings=[Finding("problem", "name", "what", "where", "fix")]).to_dict()
    looked = doctor_document(DoctorResult("here/self", "ab", report, 2))
    assert differs("data doctor", head | looked) == NOTHING
    item = {"path": "p", "kind": "release", "num_bytes": 1, "why": "w", "state": "", "lock": None}
    gone, stays = {"path": "p", "num_bytes": 1}, {"path": "p", "why": "w"}
    plan = GcPlan("here/self", "/w", (item,), (stays,), 1)
    outcome = GcOutcome("here/self", (gone,), (stays,), (stays,), 2)
    told = gc_document(GcResult((plan,), (outcome,), ()), dry_run=False)
    assert differs("runs gc", head | told) == NOTHING


def test_tokens_of_locks_are_in_no_document() -> None:
    head = {"schema": SCHEMA, "ok": True}
    listed = head | dict(locks_document(LocksResult((HostLock("here", LOCK),), ())))
    stopped = head | stop_document(
        StopResult("x", False, None, True, None, True, None, locks_kept=(LOCK,))
    )
    assert differs("locks", listed) == NOTHING
    assert differs("stop", stopped) == NOTHING
    assert MARK not in json.dumps([listed, stopped])


@pytest.mark.timeout(120)
def test_documents_of_real_verbs_are_as_documented(project: Project) -> None:
    steps: list[tuple[str, tuple[str, ...]]] = [
        ("deploy", ("deploy",)),
        ("gpus", ("gpus",)),
        ("launch", ("launch", "--tag", "x")),
        ("status", ("status",)),
        ("runs list", ("runs", "list")),
        ("stop", ("stop", "x")),
        ("pull", ("pull", "x")),
        ("exec", ("exec", "--", "printf", r"\377")),
        ("locks", ("locks", "list")),
        ("doctor", ("doctor",)),
    ]
    for title, arguments in steps:
        document = project.document(*arguments)
        rc = document.pop("rc")
        assert document["ok"] == (rc == 0), (arguments, document)
        assert differs(title, document) == NOTHING, (arguments, document)
    lines = [json.loads(line) for line in project.run("--json", "watch", "x").stdout.splitlines()]
    assert {line["type"] for line in lines} == {"event", "ended"}
    for line in lines:
        assert differs(f"watch {line['type']}", line) == NOTHING


def test_document_of_an_error_is_as_documented(project: Project) -> None:
    for arguments in (("status", "nope"), ("nosuch",)):
        document = project.document(*arguments)
        assert document.pop("rc") == document["error"]["exit_code"] == 2
        assert set(document) == {"schema", "ok", "error"}
        known = documented("error")
        assert differences(known, paths_of(document["error"], known)) == NOTHING
