"""The doctor's report for people: a fact a line, then what is wrong and how to mend it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.doctor.findings import PROBLEM
from trainer.doctor.room import DeviceFacts, DiskFacts, HostFacts, gib

if TYPE_CHECKING:
    from trainer.doctor.policy import PolicyFacts
    from trainer.doctor.report import Report
    from trainer.doctor.samples import DataFacts
    from trainer.doctor.schedule import HoursFacts, PlanFacts

_BAR = 30  # characters of the fullest range


def report_text(report: "Report") -> str:
    """Return the report as lines."""
    lines: list[tuple[str, str]] = []
    if report.data is not None:
        lines += _data_lines(report.data)
    if report.on_policy is not None:
        lines += _policy_lines(report.on_policy)
    if report.plan is not None:
        lines += _plan_lines(report.plan)
    if report.hours is not None:
        lines.append(("time", _hours(report.hours)))
    if report.disk is not None:
        lines.append(("disk", _disk(report.disk)))
    if report.host is not None:
        lines.append(("host memory", _host(report.host)))
    for name, device in report.devices.items():
        lines += _device_lines(name, device)
    width = max((len(name) for name, _ in lines), default=0)
    text = "".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in lines)
    return text + "".join(f"{finding}\n" for finding in report.findings) + _verdict(report)


def _verdict(report: "Report") -> str:
    problems = sum(finding.level == PROBLEM for finding in report.findings)
    warnings = len(report.findings) - problems
    counts = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return f"{'ready' if report.ok else 'NOT ready'}: {counts}\n"


def _data_lines(data: "DataFacts") -> Iterator[tuple[str, str]]:
    bad = f", {data.num_bad} bad lines" if data.num_bad else ""
    twice = f", {data.num_duplicates} of them twice" if data.num_duplicates else ""
    yield "samples", f"{data.num_samples}{twice}{bad}  ({data.path})"
    trained = f"{data.num_supervised} trained ({data.supervised_frac:.1%})"
    yield "tokens", f"{data.num_tokens}, {trained}"
    lengths = "  ".join(f"{name} {value}" for name, value in data.lengths.items())
    cut = f"  {data.num_at_max / data.num_samples:.1%} at data.max_length"
    yield "lengths", lengths + cut
    most = max(count for _, count in data.histogram)
    for upto, count in data.histogram:
        yield "", f"<= {upto:<7} {count:>9}  {'#' * round(_BAR * count / most)}"
    mix = data.thinking
    knows = "" if mix.template_knows else "  (the chat template does not know thinking)"
    yield "thinking", f"on {mix.num_on}  off {mix.num_off}  none {mix.num_none}{knows}"
    held = data.mask_token.num_samples
    yield "mask token", f"in {held} samples" if held else "in no sample"


def _policy_lines(policy: "PolicyFacts") -> Iterator[tuple[str, str]]:
    greedy = f"{policy.agreement:.1%} of {policy.num_tokens} tokens are the target's greedy choice"
    figures = f"mean log-prob {policy.mean_log_prob:.3f}, surprise {policy.surprise:+.3f} nats"
    yield "on-policy", f"{greedy}; {figures}"
    yield (
        "",
        "expected of its own answers: greedy 100 % but for rounding; drawn: surprise 0 or less",
    )


def _plan_lines(plan: "PlanFacts") -> Iterator[tuple[str, str]]:
    batches = f"{plan.batches_in_epoch} batches, {plan.batches_per_step} a step"
    steps = f"{plan.num_steps} in all, {plan.steps_in_epoch:.1f} an epoch ({batches})"
    yield "steps", f"{steps}; the rate warms up over {plan.num_warmup_steps}"
    seen = f"an epoch trains {plan.coverage.per_epoch:.0%} of the answers' tokens"
    seen += f", the run {plan.coverage.whole_run:.0%}"
    yield (
        "anchors",
        f"{plan.anchors_per_step:.0f} in {plan.tokens_per_step:.0f} tokens a step; {seen}",
    )


def _hours(hours: "HoursFacts") -> str:
    if hours.step_s is None or hours.hours is None:
        return hours.source
    return f"{hours.hours:.2f} h at {hours.step_s:.3f} s a step, {hours.source}"


def _disk(disk: DiskFacts) -> str:
    checkpoints = f"{disk.num_checkpoints} checkpoints of {gib(disk.checkpoint_bytes)}"
    rest = f"export {gib(disk.export_bytes)}, logs {gib(disk.log_bytes)}"
    return f"{gib(disk.needed_bytes)} ({checkpoints}, {rest}); {gib(disk.free_bytes)} free"


def _host(host: HostFacts) -> str:
    whole = f"hidden states of all samples {gib(host.features_bytes)}"
    cache = f"target.cache_bytes {gib(host.cache_bytes)}"
    free = "?" if host.available_bytes is None else gib(host.available_bytes)
    return f"{gib(host.needed_bytes)} ({cache}; {whole}); {free} available"


def _device_lines(name: str, device: DeviceFacts) -> Iterator[tuple[str, str]]:
    total = device.card.total_bytes
    card = f"{device.card.name}, {gib(total)}" if total else device.card.name
    yield name, f"about {gib(device.needed_bytes)} on {card}"
    for part, size in device.parts.items():
        if size:
            yield "", f"{part:<27} {gib(size):>10}"
