"""Seeded random faults under dflashctl at work, on the lab, and what has to hold after each.

    python -m benchmarks.fault_campaign [--seed 0] [--num 420] [--only STEP] [--minutes M]
    python -m benchmarks.fault_campaign --seed S --case N

A case is one command (deploy, launch, follow, stop or pull) with one fault at a random moment. Then
the fault ends and the campaign looks into the container, past dflashctl: no half release; no two
trainers, which would share GPUs; each numbered line of the log once and in order; exit status 0
with the effect there alone; the records of both sides equal; the same command again succeeds; and
after a stop neither process nor tmux nor GPU lock is left. It prints a table of fault and step with
the exit statuses, the violations and the seed. The status is 0 when there were none.
"""

import argparse
import json
import multiprocessing
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fault_site import (
    COMMAND_S,
    ENDLESS,
    HOST,
    VMID,
    WORKSPACE,
    FaultSite,
    open_site,
)
from benchmarks.warm_start import Command
from dflashctl.errors import LabError
from trainer.contract.completion import digest_file

FOLLOWED_STEPS = 150  # of 20 ms: a follow lasts about 3 s
EXPORT_BYTES = 30_000_000
# The longest moment of a step at which its fault comes, in seconds: about what it takes alone.
MOMENTS_S = {"deploy": 0.6, "launch": 1.4, "follow": 3.3, "stop": 0.8, "pull": 0.6}
STEPS = tuple(MOMENTS_S)
# Shares. Those of the first line begin with the command, the others at a random moment of it.
EARLY = ("latency", "locale_warning", "noise", "banner", "lock", "skew", "ro_root", "gpu")
SUDDEN = ("stall", "cut", "sshd_kill", "ct_stop", "disk_full", "client_kill")
SHARES = dict.fromkeys(EARLY, 2) | dict.fromkeys(SUDDEN, 4) | {"client_kill": 8, "gpu": 4}
GPU_STATES = ("no_driver", "mismatch", "no_devices", "lost:3", "lost_rows:3", "busy:2", "ecc:1")
REFUSING = tuple(state for state in GPU_STATES if not state.startswith("ecc"))
ENDING = ("ct_stop", "disk_full")  # faults that end a run themselves


@dataclass(frozen=True)
class Case:
    """One command under one fault. moment_s: after its start; lasts_s: of what ends by itself."""

    number: int
    step: str
    fault: str
    value: str
    moment_s: float
    lasts_s: float

    @classmethod
    def draw(cls, seed: int, number: int, only: str | None) -> "Case":
        """Draw case ``number`` of a seed; each depends on nothing else."""
        chance = random.Random(f"{seed}:{number}")
        step = only or chance.choice(STEPS)
        names = list(SHARES)
        fault = chance.choices(names, [SHARES[name] for name in names])[0]
        values = {
            "latency": f"{chance.uniform(0.1, 0.4):.2f},{chance.uniform(0.5, 1.0):.2f}",
            "skew": f"{VMID}:{chance.choice((-86400, -600, 600, 86400))}",
            "gpu": chance.choice(GPU_STATES),
            "noise": "Welcome to this host",
            "banner": "Authorised users alone",
        }
        value = values.get(fault, str(VMID) if fault in ("lock", "ro_root", "disk_full") else "1")
        moment_s = 0.0 if fault in EARLY else chance.uniform(0.05, MOMENTS_S[step])
        return cls(number, step, fault, value, moment_s, chance.uniform(0.3, 2.5))

    @property
    def tag(self) -> str:
        """Name of the run that the case has to itself."""
        return f"c{self.number}"


@dataclass(frozen=True)
class Verdict:
    """What came of a case: exit status of the command (negative: signal), rules that broke."""

    case: Case
    status: int
    violations: tuple[str, ...]
    seconds: float
    is_late: bool  # the command had ended before the fault came


class Trial:
    """One case on a site: the command under its fault, then the rules."""

    def __init__(self, site: FaultSite, case: Case, directory: Path) -> None:
        self.site, self.case = site, case
        self.out = directory / f"{case.tag}.out"
        self.violations: list[str] = []
        self.status = 0
        self.is_late = False

    def check(self, holds: object, rule: str) -> None:
        """Note a rule that does not hold."""
        if not holds:
            self.violations.append(rule)

    def command(self, *arguments: str) -> None:
        """Run the case's command under its fault, then end the fault."""
        try:
            self._begin()
            process = self.site.start(arguments, self.out)
            try:
                self._disturb(process)
                self.status = process.wait(timeout=COMMAND_S)
            except subprocess.TimeoutExpired:
                self.violations.append(f"{arguments[0]} hangs for {COMMAND_S:.0f} s")
                process.kill()
                self.status = process.wait()
        finally:
            self.site.end_faults()

    def _begin(self) -> None:
        case = self.case
        if case.fault in EARLY:
            self.site.lab.fault(HOST, case.fault, case.value)

    def _disturb(self, process: Command) -> None:
        case, lab = self.case, self.site.lab
        if case.fault in EARLY:
            return
        try:
            process.wait(timeout=case.moment_s)
        except subprocess.TimeoutExpired:
            pass
        else:
            self.is_late = True
            return
        if case.fault == "client_kill":
            process.kill()
        elif case.fault == "ct_stop":
            lab.in_host(HOST, ["pct", "stop", str(VMID)])
        elif case.fault in ("stall", "cut"):
            lab.fault(HOST, "net", case.fault)
            time.sleep(case.lasts_s)
            lab.fault(HOST, "net", "off")
        else:
            lab.fault(HOST, case.fault, case.value)
            if case.fault == "disk_full":
                time.sleep(case.lasts_s)
                lab.fault(HOST, case.fault, "off")

    def error(self) -> str:
        """Return the last words of the command on stderr, if it was started at all."""
        err = self.out.with_suffix(".err")
        return err.read_text(errors="replace").strip()[-300:] if err.exists() else ""

    def again(self, *arguments: str) -> dict[str, Any]:
        """Run a command without a fault as JSON; its document with ``rc``."""
        done = self.site.run("--json", *arguments)
        document: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
        return document | {"rc": done.returncode, "stderr": done.stderr[-300:]}

    def deploy(self) -> None:
        """No release or a whole one, whatever came; deploy again makes and finds it whole."""
        site = self.site
        site.shell(f"rm -rf {WORKSPACE}/releases")
        self.command("deploy")
        names = site.look().releases
        whole = [name for name in names if not name.startswith(".")]
        if self.status == 0:
            self.check(len(whole) == 1, f"deploy said 0 and left {names}")
        done = self.again("deploy")
        self.check(done["rc"] == 0, f"deploy again: {done}")
        if done["rc"] == 0:
            (place,) = done["places"]
            self.check(place["repaired"] == [], f"a half release: {place['repaired']}")
            self.check(whole in ([], [place["digest"]]), f"releases {names}")
            self.check(self.status or place["num_sent"] == 0, "deploy said 0 and had not sent all")
            left = site.settled(lambda look: look.releases == [place["digest"]]).releases
            self.check(left == [place["digest"]], f"left in releases: {left}")

    def launch(self) -> None:
        """At most one trainer, equal records, launch again completes it, stop leaves nothing."""
        case, site = self.case, self.site
        self.command("launch", "--tag", case.tag, "--set", ENDLESS)
        look = site.look()
        self.check(len(look.trainers) <= 1, f"two trainers: {look.trainers}")
        began = look.record(case.tag, "process") is not None
        if self.status == 0:
            self.check(began and site.local(case.tag), "launch said 0 and there is no run")
            self.check(look.trainers or case.fault in ENDING, "launch said 0 and no trainer lives")
        if case.fault == "gpu" and case.value in REFUSING:
            self.check(self.status in (1, 3, 7, 8), f"launched on {case.value}")
            self.check(not began, f"a run on {case.value}")
        self._launch_again()
        self._agree()
        self._stop_and_leave_nothing()

    def _launch_again(self) -> None:
        tag, site = self.case.tag, self.site
        done = self.again("launch", "--tag", tag, "--set", ENDLESS)
        code = (done.get("error") or {}).get("code")
        if code == "tag-exists" or (code == "run-failed" and self.case.fault in ENDING):
            look = site.settled(lambda look: look.record(tag, "process") is not None)
            if not look.trainers:  # it had started, and the fault ended it
                done = self.again("launch", "--resume", tag)
                self.check(done["rc"] == 0, f"resume: {done}")
        else:
            self.check(done["rc"] == 0, f"launch again: {done}")
        look = site.look()
        self.check(len(look.trainers) == 1, f"trainers after launch again: {look.trainers}")

    def _agree(self) -> None:
        tag, site = self.case.tag, self.site
        here, there = site.local(tag), site.look().record(tag, "manifest")
        ids = [record and record["run_id"] for record in (here, there)]
        self.check(ids[0] and ids[0] == ids[1], f"run here and there: {ids}")
        self.check(not site.has_intent(tag), "an intent is left beside the record")

    def _stop_and_leave_nothing(self) -> None:
        tag = self.case.tag
        done = self.again("stop", tag, "--grace", "10")
        self.check(done["rc"] == 0, f"stop: {done}")
        self._left_nothing()

    def _left_nothing(self) -> None:
        look = self.site.settled(lambda look: not look.processes)
        self.check(not look.processes, f"left behind: {look.processes}")
        steps = _steps(look.runs.get(self.case.tag, {}).get("metrics") or "")
        self.check(_rises(steps), f"steps are not those of one trainer: {steps[-20:]}")
        found = self.again("gpus")
        states = [row["gpu"]["state"] for host in found.get("hosts", ()) for row in host["rows"]]
        self.check(states == ["idle"] * 8, f"GPUs after stop: {states} {found['stderr']}")

    def stop(self) -> None:
        """Status 0 means a checkpoint and nobody alive; stop again says the same."""
        case, site = self.case, self.site
        site.must("launch", "--tag", case.tag, "--set", ENDLESS)
        self.command("--json", "stop", case.tag, "--grace", "5")
        look = site.look()
        if self.status == 0:
            said, ended = json.loads(self.out.read_text()), look.record(case.tag, "exit")
            self.check(not look.trainers, "stop said 0 and the trainer lives")
            if not said["ended_before"]:  # a fault may end a run before stop comes
                self.check(ended and ended["state"] == "stopped", f"stop said 0: {ended}")
                self.check(look.runs[case.tag]["checkpoints"], "stop said 0: no checkpoint")
        self._stop_and_leave_nothing()
        self._agree()

    def follow(self) -> None:
        """Each line once and in order up to where it ended; again it gives the whole log."""
        case, site = self.case, self.site
        site.must("launch", "--tag", case.tag, "--set", f"optim.max_steps={FOLLOWED_STEPS}")
        is_log = case.number % 2 == 0
        verb = ("logs", "-f") if is_log else ("--json", "watch")
        self.command(*verb, case.tag)
        self._followed(self.out.read_bytes(), is_log=is_log, whole=self.status == 0)
        look = site.settled(lambda look: not look.trainers)
        self.check(not look.trainers, "the run does not end")
        done = site.run("logs", "-f", case.tag)
        log = look.runs[case.tag]["log"]
        self.check(done.returncode in (0, 1), f"logs again: {done.returncode} {done.stderr}")
        self.check(done.stdout == log, "logs again is not the log")
        ended = look.record(case.tag, "exit")
        finished = ended is not None and ended["state"] == "finished"
        self.check(finished or self.status, f"follow said 0 of a run that ended as {ended}")
        self._left_nothing()

    def _followed(self, data: bytes, *, is_log: bool, whole: bool) -> None:
        lines = data.decode(errors="replace").split("\n")[:-1]  # the last may be cut by the kill
        if is_log:
            seen = [int(line.split()[1]) for line in lines if line.startswith("line ")]
        else:
            seen = _steps("\n".join(lines))
        self.check(seen == list(range(1, len(seen) + 1)), f"lines lost or repeated: {_gap(seen)}")
        if whole:
            self.check(len(seen) == FOLLOWED_STEPS, f"0 after {len(seen)} of {FOLLOWED_STEPS}")

    def pull(self) -> None:
        """No file in place that differs; status 0 and pull again mean that all is there."""
        site = self.site
        here = site.project.root / "runs" / "base"
        there = _digests(site)
        _clear(here)
        self.command("pull", "base")
        found = {name: digest_file(here / name) for name in there if (here / name).exists()}
        wrong = [name for name in found if found[name] != there[name]]
        self.check(not wrong, f"half files in place: {wrong}")
        self.check(self.status or found == there, f"pull said 0 without {set(there) - set(found)}")
        done = self.again("pull", "base")
        self.check(done["rc"] == 0, f"pull again: {done}")
        found = {name: digest_file(here / name) for name in there if (here / name).exists()}
        self.check(found == there, f"pull again without {set(there) - set(found)}")


def _digests(site: FaultSite) -> dict[str, str]:
    script = f"cd {WORKSPACE}/runs/base && sha256sum export/* metrics.jsonl *.log exit.json"
    pairs = (line.split() for line in site.shell(script).splitlines())
    return {name: digest for digest, name in pairs}


def _clear(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        elif path.name != "manifest.json" or path.parent != directory:
            path.unlink()


def _steps(text: str) -> list[int]:
    found = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue  # cut by a kill or a full disk
        event = document.get("event", document)
        if isinstance(event, dict) and event.get("kind") == "step":
            found.append(int(event["step"]))
    return found


def _rises(steps: Sequence[int]) -> bool:
    """Say whether one trainer at a time wrote them: one by one, or on from a checkpoint."""
    return all(b == a + 1 or (b <= a and b % 10 == 1) for a, b in pairwise(steps))


def _gap(seen: Sequence[int]) -> str:
    for place, number in enumerate(seen, 1):
        if place != number:
            return f"{number} in place of {place}"
    return ""


def try_case(site: FaultSite, case: Case, directory: Path) -> Verdict:
    """Run one case and clear up after it."""
    began_s = time.monotonic()
    trial = Trial(site, case, directory)
    run: Callable[[], None] = getattr(trial, case.step)
    try:
        run()
    except (RuntimeError, LabError, subprocess.SubprocessError, LookupError, ValueError) as error:
        trial.violations.append(f"the campaign broke: {type(error).__name__}: {error}"[:600])
    took_s = time.monotonic() - began_s
    if trial.violations:
        trial.violations.append(f"its own words ({trial.status}): {trial.error()}")
    site.forget(case.tag)
    return Verdict(case, trial.status, tuple(trial.violations), took_s, trial.is_late)


def work(cases: Sequence[Case], results: Any, end_s: float) -> None:
    """Try cases on one site until the time is over; each verdict goes into ``results``."""
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-") as name:
            site = open_site(Path(name))
            try:
                if any(case.step == "pull" for case in cases):
                    site.make_base(EXPORT_BYTES)
                for case in cases:
                    if time.monotonic() > end_s:
                        break
                    results.put(try_case(site, case, Path(name)))
            finally:
                site.close()
                site.lab.down()
    finally:
        results.put(None)


def campaign(cases: Sequence[Case], workers: int, minutes: float) -> list[Verdict]:
    """Try the cases with some sites at once; print a line for each that took place."""
    results: Any = multiprocessing.Queue()
    end_s = time.monotonic() + minutes * 60
    shares = [cases[place::workers] for place in range(workers)]
    processes = [
        multiprocessing.Process(target=work, args=(s, results, end_s)) for s in shares if s
    ]
    for process in processes:
        process.start()
    verdicts, running = [], len(processes)
    while running:
        verdict = results.get()
        if verdict is None:
            running -= 1
            continue
        verdicts.append(verdict)
        print(line_of(verdict), flush=True)
    for process in processes:
        process.join()
    return verdicts


def line_of(verdict: Verdict) -> str:
    """Return one line for a case, and one for each rule that broke."""
    case = verdict.case
    moment = "after its end" if verdict.is_late else f"at {case.moment_s:.2f} s"
    head = (
        f"case {case.number:<4} {case.step:<7} {case.fault:<15} {case.value:<12} {moment:<14} "
        f"exit {verdict.status:<4} {verdict.seconds:5.1f} s"
    )
    return "\n".join([head, *(f"    VIOLATION {text}" for text in verdict.violations)])


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the table of fault and step: cases, exit statuses, violations."""
    lines = ["| fault | step | cases | exit statuses | violations |", "|---|---|---|---|---|"]
    for fault in SHARES:
        for step in STEPS:
            of = [v for v in verdicts if (v.case.fault, v.case.step) == (fault, step)]
            if of:
                statuses = Counter(v.status for v in of)
                said = ", ".join(f"{n} x {_status(s)}" for s, n in sorted(statuses.items()))
                broken = sum(bool(v.violations) for v in of)
                lines.append(f"| {fault} | {step} | {len(of)} | {said} | {broken} |")
    return "\n".join(lines)


def _status(status: int) -> str:
    return str(status) if status >= 0 else signal.Signals(-status).name


def main() -> int:
    """Try the chosen cases; return 0 when no rule broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=420, help="cases")
    parser.add_argument("--case", type=int, nargs="+", help="these cases of the seed alone")
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no case after this")
    parser.add_argument("--workers", type=int, default=4, help="labs at once")
    args = parser.parse_args()
    numbers = args.case or range(args.num)
    cases = [Case.draw(args.seed, number, args.only) for number in numbers]
    began_s = time.monotonic()
    verdicts = campaign(cases, args.workers, args.minutes)
    broken = [verdict for verdict in verdicts if verdict.violations]
    late = sum(verdict.is_late for verdict in verdicts)
    print(f"\n{table(verdicts)}\n")
    print(
        f"seed {args.seed}: {len(verdicts)} of {len(cases)} cases in "
        f"{time.monotonic() - began_s:.0f} s, {late} faults came after the command's end, "
        f"{len(broken)} cases with violations"
    )
    for verdict in broken:
        only = f" --only {args.only}" if args.only else ""
        print(f"again: --seed {args.seed} --case {verdict.case.number}{only}")
    return 1 if broken or len(verdicts) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
