"""What the verbs wait for, on the lab, where every pct call takes 0.6 to 1.0 s as on a real node.

    python -m benchmarks.round_trips gpus [--repeats 5]   # 16 containers on two hosts against one
    python -m benchmarks.round_trips flow [--repeats 5]   # the road to a first log line
    python -m benchmarks.round_trips pull [--repeats 5]   # 200 MB to the laptop, equal by digest

``gpus`` takes turns between one container and all of them, so that other work on the machine slows
both. ``flow`` types deploy (which verifies), gpus, and launch, whose receipt has a line of the log,
and counts the calls of pct; ``--typed`` walks the same road by hand, with ssh and pct. The trainer
is a stand-in without torch: what is timed is the way there and back. Both print every repeat, then
the medians.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.fault_site import ENDLESS, HOST, PLACE, VMID, WORKSPACE, FaultSite
from dflashctl.lab.interpreter import python_paths
from dflashctl.lab.site import Lab
from dflashctl.lab.spec import ContainerSpec, HostSpec, SiteSpec
from trainer.contract.completion import digest_file

LATENCY = "0.6,1.0"
CONTAINERS_A_HOST = 8
PULLED_BYTES = 200_000_000


def many_containers() -> SiteSpec:
    """Return two hosts of eight GPUs and eight containers each."""
    containers = {VMID + number: ContainerSpec() for number in range(CONTAINERS_A_HOST)}
    containers[VMID] = replace(containers[VMID], workspace="1g")
    hosts = {
        name: HostSpec(ip=f"10.1.2.{last}", gpus=8, containers=containers)
        for name, last in ((HOST, 6), ("kpro7", 7))
    }
    return SiteSpec(hosts, expose=tuple(python_paths(sys.executable)))


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that ``action`` takes."""
    began_s = time.monotonic()
    action()
    return time.monotonic() - began_s


def must(site: FaultSite, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run dflashctl as from a shell. Raises: RuntimeError."""
    done = site.project.run(*arguments)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit {done.returncode}: {done.stderr}")
    return done


def measure_gpus(site: FaultSite, repeats: int) -> None:
    """Print what ``gpus`` takes over one container and over all."""
    ratios = []
    for _ in range(repeats):
        one_s = timed(lambda: must(site, "-l", PLACE, "gpus"))
        all_s = timed(lambda: must(site, "gpus"))
        ratios.append(all_s / one_s)
        print(f"gpus: one {one_s:.2f} s, all {all_s:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"gpus: ratio of {2 * CONTAINERS_A_HOST} containers to one: median {median(ratios):.2f}")


def walk(site: FaultSite, tag: str) -> list[tuple[str, float, int]]:
    """Take the road once; return each step with its seconds and its calls of pct."""
    verbs = {
        "deploy": ("deploy",),
        "gpus": ("gpus",),
        "launch": ("launch", "--tag", tag, "--set", ENDLESS),
    }
    taken = []
    for name, arguments in verbs.items():
        before, began_s = len(site.lab.pct_calls(HOST)), time.monotonic()
        done = must(site, "-l", PLACE, *arguments)
        taken.append((name, time.monotonic() - began_s, len(site.lab.pct_calls(HOST)) - before))
    if "\n  log says " not in done.stdout:
        raise RuntimeError(f"no line of the log: {done.stdout}")
    return taken


def measure_flow(site: FaultSite, repeats: int) -> None:
    """Print what the road takes, from a container without the release."""
    totals = []
    for number in range(repeats):
        site.shell(f"rm -rf {WORKSPACE}/releases")
        taken = walk(site, f"flow{number}")
        totals.append(sum(seconds for _, seconds, _ in taken))
        steps = ", ".join(f"{name} {seconds:.2f} s ({calls})" for name, seconds, calls in taken)
        print(f"flow: {totals[-1]:.2f} s: {steps}", flush=True)
        must(site, "-l", PLACE, "stop", f"flow{number}")
    print(f"flow: median {median(totals):.2f} s")


def measure_typed(site: FaultSite) -> None:
    """Print what the same road takes with ssh and pct, a command a step."""
    state, name = site.lab.state, "typed"
    inside = f"pct exec {VMID} --"
    tar = f"/workspace/{name}.tar"
    with tempfile.TemporaryDirectory() as made:
        subprocess.run(["tar", "-cf", f"{made}/x.tar", "-C", site.project.code, "."], check=True)
        data = Path(f"{made}/x.tar").read_bytes()
    steps: Sequence[tuple[str, bytes]] = (
        ("mkdir -p /tmp/typed", b""),
        (f"cat >/tmp/typed/{name}.tar", data),
        (f"pct status {VMID}", b""),
        (f"{inside} mkdir -p /workspace/{name}", b""),
        (f"pct push {VMID} /tmp/typed/{name}.tar {tar}", b""),
        (f"{inside} tar -xf {tar} -C /workspace/{name}", b""),
        (f"{inside} sha256sum {tar}", b""),
        (f"{inside} nvidia-smi --query-gpu=index,memory.used --format=csv", b""),
        (f"{inside} nvidia-smi --query-compute-apps=pid,used_memory --format=csv", b""),
        (f"{inside} df -h /workspace", b""),
        (f"{inside} tmux new-session -d -s {name} 'echo line 1 >/workspace/{name}/log; cat'", b""),
        (f"{inside} tmux has-session -t {name}", b""),
        (f"{inside} tail -n 1 /workspace/{name}/log", b""),
    )
    config, total_s = str(state / "ssh_config"), 0.0
    for command, sent in steps:
        argv = ["ssh", "-F", config, HOST, _for_pct(command)]
        total_s += timed(
            lambda argv=argv, sent=sent: subprocess.run(  # type: ignore[misc]
                argv, input=sent, capture_output=True, check=True
            )
        )
    site.shell("tmux kill-server")
    print(f"typed by hand: {total_s:.2f} s in {len(steps)} commands")


def measure_pull(site: FaultSite, repeats: int) -> None:
    """Print what a pull of a run with 200 MB takes; each is compared by its digest."""
    site.make_base(PULLED_BYTES)
    here = site.project.root / "runs" / "base" / "export" / "weights"
    there = site.shell(f"sha256sum {WORKSPACE}/runs/base/export/weights").split()[0]
    times = []
    for _ in range(repeats):
        here.unlink(missing_ok=True)
        times.append(timed(lambda: must(site, "-l", PLACE, "pull", "base")))
        found = digest_file(here)
        if found != there:
            raise RuntimeError(f"the digest here is {found}, there {there}")
        print(f"pull: 200 MB in {times[-1]:.2f} s, digest equal ({found[:12]})", flush=True)
    print(f"pull: median {median(times):.2f} s")


def _for_pct(command: str) -> str:
    return shlex.join(shlex.split(command)) if command.startswith("pct") else command


MEASURES = {"gpus": measure_gpus, "flow": measure_flow, "pull": measure_pull}


def main() -> int:
    """Measure what is asked on a lab of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*MEASURES, "all"), nargs="?", default="all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--typed", action="store_true", help="the road by hand as well")
    parser.add_argument("--backend", choices=("fabric", "openssh"), default="fabric")
    args = parser.parse_args()
    lab = Lab(Path(tempfile.mkdtemp(prefix="lab-")))
    lab.up(many_containers(), owner=os.getpid())
    try:
        with tempfile.TemporaryDirectory(prefix="trips-") as name:
            site = FaultSite(lab, Path(name))
            hosts = site.project.root / "hosts.yaml"
            backend = f"    backend: {args.backend}\n    address:"
            hosts.write_text(hosts.read_text().replace("    address:", backend))
            for host in (HOST, "kpro7"):
                lab.fault(host, "latency", LATENCY)
            for what, measure in MEASURES.items():
                if args.what in (what, "all"):
                    measure(site, args.repeats)
            if args.typed:
                measure_typed(site)
            site.close()
    finally:
        lab.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
