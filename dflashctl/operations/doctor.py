"""doctor: is everything there that a launch needs, from the laptop to the driver.

Hosts are asked in parallel; one round trip on a node, one in each of its containers.
"""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashctl.command import quote
from dflashctl.diagnosis import FAIL, Check, Checks
from dflashctl.diagnosis.container import Interval, judge_container
from dflashctl.diagnosis.laptop import PLACE as LAPTOP
from dflashctl.diagnosis.laptop import judge_laptop
from dflashctl.diagnosis.node import judge_node
from dflashctl.errors import DflashctlError, ExitCode
from dflashctl.gpu_roles import uses_gpus
from dflashctl.inventory import Host, Place, by_host
from dflashctl.program import Program, run_program
from dflashctl.run_status import MAX_HOSTS_AT_ONCE
from dflashctl.transport import connect, connect_host, run_script
from dflashctl.transport.base import Script
from dflashctl.transport.parallel import at_once

_COMMAND_S = 15.0  # each command on a node; nvidia-smi without persistence mode takes seconds
_CHILD_S = 60.0  # importing torch from a cold disk
_MEND_S = 300.0


@dataclass(frozen=True)
class DoctorRequest:
    """What to look at. target: the target's directory, to see what kind it is."""

    inventory: Path
    places: tuple[Place, ...]
    requirements_digest: str
    target: str | None = None
    accept_new: bool = False


@dataclass(frozen=True)
class DoctorResult:
    """All checks in order, and how the command is to end."""

    checks: tuple[Check, ...]
    exit_code: int

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(check.status == FAIL for check in self.checks)

    def with_more(self, more: Sequence[Check]) -> "DoctorResult":
        """Return it with further checks, each after those of its place."""
        places = list(dict.fromkeys(check.place for check in (*self.checks, *more)))
        checks = sorted((*self.checks, *more), key=lambda check: places.index(check.place))
        failed = any(check.status == FAIL for check in more)
        code = self.exit_code or int(ExitCode.FAILED if failed else ExitCode.OK)
        return DoctorResult(tuple(checks), code)


@dataclass(frozen=True)
class _Examined:
    checks: list[Check]
    unreachable: int = 0  # the exit code of a host that was not reached


def examine(request: DoctorRequest) -> DoctorResult:
    """Look at the laptop, then at every host of the places; changes nothing."""
    hosts = by_host(request.places)
    found = judge_laptop(request.inventory, [host for host, _ in hosts])
    answers = at_once(lambda one: _host(request, *one), hosts, MAX_HOSTS_AT_ONCE, "doctor")
    checks = (*found, *(check for answer in answers for check in answer.checks))
    lost = [answer.unreachable for answer in answers if answer.unreachable]
    failed = any(check.status == FAIL for check in checks)
    code = int(ExitCode.FAILED) if failed else int(ExitCode.OK)
    return DoctorResult(checks, max(lost) if lost and len(lost) == len(answers) else code)


def _host(request: DoctorRequest, host: Host, places: list[Place]) -> _Examined:
    try:
        checks = _node(request, host, places)
    except DflashctlError as error:
        broken = Checks(host.name)
        broken.fail("reach", error.message, error.hint)
        for place in places:
            broken.noted += _skipped(place, "its node gave no answer")
        away = error.exit_code in (ExitCode.UNREACHABLE, ExitCode.TRUST)
        return _Examined(broken.noted, int(error.exit_code) if away else 0)
    down = {check.name for check in checks if check.status == FAIL}
    for place in places:
        vmid = place.container.vmid
        cause = next((name for name in ("pct", "root", f"container {vmid}") if name in down), None)
        if cause is not None and vmid is not None:
            checks += _skipped(place, f"see `{cause}` of {host.name}")
        else:
            checks += _place(request, place)
    return _Examined(checks)


def _skipped(place: Place, why: str) -> list[Check]:
    checks = Checks(place.label)
    checks.skip("reach", why)
    return checks.noted


def _node(request: DoctorRequest, host: Host, places: list[Place]) -> list[Check]:
    """Ask the node. Raises: DflashctlError when it gives no answer."""
    node = connect_host(host, accept_new=request.accept_new)
    try:
        become = host.become == "sudo" or (host.become == "auto" and node.user != "root")
        vmids = [place.container.vmid for place in places if place.container.vmid is not None]
        arguments = {
            "vmids": vmids,
            "become": become and host.backend != "local",
            "limit_s": _COMMAND_S,
        }
        deadline_s = 6 * _COMMAND_S
        facts = run_program(node, Program("node_facts", arguments, deadline_s=deadline_s))
    finally:
        node.close()
    containers = [place.container for place in places]
    reached = Checks(host.name)
    reached.ok("reach", f"as {node.user}" if node.user else "this machine")
    return reached.noted + judge_node(host, containers, facts, become=become)


def _place(request: DoctorRequest, place: Place) -> list[Check]:
    container = place.container
    arguments = {
        "workspace": container.workspace,
        "log_dir": container.log_dir,
        "python": container.python,
        "requirements_digest": request.requirements_digest,
        "gpus": uses_gpus(container),
        "target": request.target,
        "limit_s": _CHILD_S,
    }
    program = Program("container_facts", arguments, (), 3 * _CHILD_S, container.python)
    try:
        inside = connect(place, accept_new=request.accept_new)
        try:
            sent_unix_s = time.time()
            facts = run_program(inside, program)
            received_unix_s = time.time()
        finally:
            inside.close()
    except DflashctlError as error:
        checks = Checks(place.label)
        checks.fail("reach", error.message, error.hint)
        return checks.noted
    return judge_container(container, facts, Interval(sent_unix_s, received_unix_s))


def mendable(result: DoctorResult) -> list[Check]:
    """Return the checks whose fix is safe to make here and now."""
    return [check for check in result.checks if check.mend]


def asks_first(check: Check) -> bool:
    """Say whether the user is to be asked before: whatever installs something."""
    return "apt-get" in " ".join(check.mend)


def mend(check: Check, places: Sequence[Place], *, accept_new: bool) -> None:
    """Run the fix of one check where it belongs. Raises: DflashctlError when it fails."""
    if check.place == LAPTOP:
        done = subprocess.run(
            list(check.mend), capture_output=True, text=True, check=False, timeout=_MEND_S
        )
        if done.returncode != 0:
            raise DflashctlError(f"{check.fix} failed", hint=done.stderr.strip(), place=LAPTOP)
        return
    place = next(place for place in places if place.label == check.place)
    way = connect(place, accept_new=accept_new)
    try:
        script = Script(quote(check.mend), deadline_s=_MEND_S, what="fix")
        run_script(way, script).check(
            DflashctlError, f"{check.name}: the fix failed", place=way.place
        )
    finally:
        way.close()
