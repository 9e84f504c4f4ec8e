"""What the acting verbs print: receipts for people. Everything is plain text, never markup."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflashctl.errors import DflashctlError
from dflashctl.log_lines import clean
from dflashctl.render.failure import failure_fields
from dflashctl.render.tables import size

if TYPE_CHECKING:  # a verb loads its own operation, and not those of the others
    from dflashctl.operations.data_doctor import DoctorResult
    from dflashctl.operations.deploy import DeployResult
    from dflashctl.operations.evaluate import EvaluateResult
    from dflashctl.operations.launch import LaunchResult
    from dflashctl.operations.push import PushResult
    from dflashctl.operations.stop import StopResult
    from dflashctl.operations.warmup import WarmupResult
    from trainer.contract.manifest import Manifest


def deploy_text(result: "DeployResult") -> str:
    """Return the receipt of ``deploy`` for one container."""
    name = f"{result.place}  release {result.digest[:12]}"
    change = f"+{len(result.added)} ~{len(result.changed)} -{len(result.removed)} files"
    if result.dry_run:
        lines = [f"{name}  {change} would change (dry run: nothing was sent)"]
        for sign, paths in (("+", result.added), ("~", result.changed), ("-", result.removed)):
            lines += [f"  {sign} {path}" for path in paths]
    elif result.num_sent == 0:
        lines = [f"{name}  is there: 0 files sent, {result.num_files} verified"]
    else:
        sent = f"{result.num_sent} files sent, {size(result.sent_bytes)}, verified"
        lines = [f"{name}  {sent}  ({change})"]
    if result.repaired and not result.dry_run:
        lines.append(f"  replaced a damaged copy: {', '.join(result.repaired[:5])}")
    if result.environment is not None:
        done = "made" if result.environment["built"] else "is there"
        lines.append(f"  environment {result.environment['key'][:12]} {done}")
        lines.append(f"  python      {result.environment['python']}")
    return "\n".join(lines) + "\n"


def deploy_document(
    results: "Sequence[DeployResult]", failures: Sequence[DflashctlError]
) -> dict[str, Any]:
    """Return what ``deploy --json`` tells of every container."""
    return {
        "places": [asdict(result) for result in results],
        "failures": [failure_fields(error) for error in failures],
    }


def push_text(result: "PushResult") -> str:
    """Return the receipt of ``push``."""
    head = f"{result.place}:{result.directory}  {len(result.sent)} files"
    if result.dry_run:
        head += " would be sent"
    else:
        head += f" sent, {size(result.sent_bytes)}, verified" if result.sent else " sent"
    return f"{head}; {result.num_unchanged} unchanged\n"


def pinned_text(manifest: "Manifest") -> str:
    """Return what a launch pinned, one fact a line."""
    commit = manifest.git_commit[:12] if manifest.git_commit else "none (installed package)"
    facts = [
        ("run", f"{manifest.tag}  ({manifest.run_id})"),
        ("release", manifest.release[:12]),
        ("git", f"{commit}{' + changes' if manifest.git_dirty else ''}"),
        ("target", f"{manifest.config['target']['path']}  {manifest.target_revision[:19]}"),
        ("data", f"{manifest.config['data']['path']}  sha256:{manifest.dataset_sha256[:12]}"),
        ("packages", ", ".join(f"{k} {v}" for k, v in sorted(manifest.packages.items()))),
        ("target on", _devices(manifest, "target")),
        ("drafter on", _devices(manifest, "drafter")),
        ("seed", str(manifest.seed)),
        ("check", manifest.check),
        ("log", manifest.log_path),
        ("tmux", manifest.tag),
    ]
    return "".join(f"  {name:<11} {value}\n" for name, value in facts)


def _devices(manifest: "Manifest", role: str) -> str:
    gpus = manifest.devices(role)
    if all(gpu.uuid is None for gpu in gpus):
        return f"cpu, {len(gpus)} thread{'s' if len(gpus) > 1 else ''}"
    return ", ".join(f"GPU {gpu.index} {str(gpu.uuid)[:12]}" for gpu in gpus)


def launch_text(result: "LaunchResult") -> str:
    """Return the receipt of ``launch``: what was seen, what was pinned, what to type next."""
    tag = result.manifest.tag
    verb = "resumed" if result.resumed else "launched"
    if result.adopted:
        verb = "launched by the interrupted command, completed now"
    if result.state == "ended":
        proof = "it has finished already"
    elif result.event is None:
        proof = "its process lives; no event yet"
    else:
        proof = f"its process lives and wrote {result.event['kind']!r}"
    pid = f" (pid {result.process['trainer_pid']})" if result.process else ""
    head = f"{result.manifest.place}  {tag} {verb}; a second look saw: {proof}{pid}\n"
    following = [f"watch {tag}", f"logs {tag} -f", f"stop {tag}", f"attach {tag}"]
    nexts = "".join(f"  dflashctl {command}\n" for command in following)
    return f"{head}{pinned_text(result.manifest)}{_said(result)}next:\n{nexts}"


def _said(result: "LaunchResult") -> str:
    """Return the last line that its log had by then."""
    lines = [line for line in result.log if line.strip()]
    return f"  log says    {clean(lines[-1].encode())}\n" if lines else ""


def _last_of(record: dict[str, Any]) -> list[str]:
    """Return the lines of an exit record; without one nothing is known, which is not "none"."""
    if not record:
        return ["  the checkpoint   is shown by: dflashctl status"]
    return [
        f"  last step        {record.get('last_step') or 'none'}",
        f"  last checkpoint  {record.get('last_checkpoint') or 'none'}",
    ]


def stop_text(result: "StopResult") -> str:
    """Return what ``stop`` proved."""
    record = result.exit or {}
    if result.ended_before:
        head = f"{result.tag} had ended before: {record.get('state', 'no exit record')}"
    elif not result.gone:
        head = f"{result.tag} still lives after SIGKILL (a process in state D?)"
    else:
        head = f"{result.tag} ended by {result.signal}: {record.get('state', 'no exit record')}"
    released = {True: "released", False: "STILL HELD", None: "none visible"}
    lines = [
        head,
        *_last_of(record),
        f"  tmux session     {'gone' if result.session_gone else 'STILL THERE'}",
        f"  GPUs             {released[result.gpus_released]}",
    ]
    if result.locks_kept:
        lines.append(f"  GPU locks        STILL HELD: {result.locks_kept[0].why}")
    return "\n".join(lines) + "\n"


def stop_document(result: "StopResult") -> dict[str, Any]:
    """Return the document of ``stop``; the tokens of locks stay out of it."""
    from dflashctl.render.gpus import public_lock

    return asdict(result) | {"locks_kept": [public_lock(lock) for lock in result.locks_kept]}


def warmup_progress(report: dict[str, Any]) -> str:
    """Return a line for what the trainer reports on its way; "" for what the receipt tells."""
    if report["kind"] == "warmup_loaded":
        return f"target and data loaded in {report['load_s']:.1f} s\n"
    if report["kind"] == "warmup":
        return f"{report['device']} is warm after {report['warmup_s']:.1f} s\n"
    return ""


def warmup_text(result: "WarmupResult") -> str:
    """Return seconds and compiles of each drafter device."""
    lines = [f"{result.place}  warm: release {result.release[:12]}, cache {result.cache_dir}"]
    for report in result.devices:
        seconds, compiles = report.get("warmup_s"), report.get("num_compiles")
        lines.append(f"  {report.get('device', '?')}  {seconds} s  {compiles} compiles")
    lines += [f"  began with {result.loaded}"] if result.loaded else []
    lines += [f"  its caches are in {result.saved}"] if result.saved else []
    lines += [f"  {note}" for note in result.notes]
    return "\n".join(lines) + "\n"


def doctor_text(result: "DoctorResult") -> str:
    """Return the trainer's own words, and where they were said."""
    return f"{result.place}  release {result.release[:12]}\n{result.report['text']}"


def doctor_document(result: "DoctorResult") -> dict[str, Any]:
    """Return the report without its words."""
    report = {k: v for k, v in result.report.items() if k not in ("kind", "v", "ok", "text")}
    return {"place": result.place, "release": result.release, **report}


def evaluate_text(result: "EvaluateResult") -> str:
    """Return the figures of an evaluation; single prompts and differences are left to --json."""
    found = result.evaluation
    equal, asked = found.get("num_equal"), found.get("num_prompts")
    lines = [
        (
            f"{result.tag}  measured by real decoding of {asked} prompts,"
            f" block size {found.get('block_size')}, target {found.get('target_dtype')}"
        ),
        (
            f"  acceptance length  {found['acceptance_length']:.2f}"
            f"{_interval(found.get('acceptance_length_interval'))}"
        ),
    ]
    if found.get("by_position"):
        shares = "  ".join(f"{share:.2f}" for share in found["by_position"])
        lines.append(f"  by position        {shares}")
    equals = f"{equal} of {asked} outputs equal plain greedy decoding"
    lines.append(f"  lossless           {'yes' if found['lossless'] else 'no'}: {equals}")
    if not found["lossless"]:
        ties = found.get("num_near_ties")
        lines.append(f"  near-ties          {ties} of the first differences")
    if found.get("speed_up") is not None:
        lines.append(f"  speed-up           {found['speed_up']:.2f} on equal output")
    if found.get("walk_acceptance_length") is not None:
        lines.append(
            f"  walk estimate      {found['walk_acceptance_length']:.2f}"
            f"{_interval(found.get('walk_acceptance_length_interval'))}"
        )
    return "\n".join(lines) + "\n"


def _interval(bounds: Sequence[float] | None) -> str:
    return f"  (95 % of resampled prompts: {bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
