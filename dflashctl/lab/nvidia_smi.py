#!/usr/bin/python3 -S
"""A stand-in for nvidia-smi; what it says comes from the host's gpu.json.

Copied into hosts and containers as /usr/bin/nvidia-smi; standard library only. Keys of gpu.json
(docs/lab.md): state, driver, hide_container_processes, gpus: [{name, memory.total, memory.used,
utilization.gpu, lost, ecc, mig, apps: [{pid, name, mem}], ...}]; memory in MiB.

A process of the host or of any of its containers that has PVE_LAB_GPU_MIB=N in its environment
counts as N MiB on the GPUs that its CUDA_VISIBLE_DEVICES names (all, when it is unset). Of a tree
of such processes with equal values only the largest counts: the trainer, not what started it.
As with the real driver, the host sees its processes by their pids there; a container sees their
memory but, unless hide_container_processes is false, no process.
"""

# pathlib would add to the start-up time of every call, of which there are many.
# ruff: noqa: PTH110, PTH119, PTH123, PTH208

import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

ON_HOST = "/var/lib/pve-lab/shared/gpu.json"
IN_CONTAINER = "/var/lib/pve-lab/gpu.json"
HOST_PROC = "/var/lib/pve-lab-proc"
# Programs that carry the environment of a job without being it.
CARRIERS = frozenset(
    ("sh", "bash", "dash", "env", "sudo", "ssh", "sshd", "tmux", "timeout", "setsid", "nsenter")
) | {"lxc-attach", "nvidia-smi"}

Gpu = dict[str, Any]
Process = dict[str, Any]


def fail(code: int, text: str) -> NoReturn:
    """End as the real one: errors go to stdout."""
    say(text)
    sys.exit(code)


def say(text: str) -> None:
    """A line on stdout."""
    sys.stdout.write(text + "\n")


# ---- processes


def read(path: str) -> bytes:
    """A file of /proc."""
    with open(path, "rb") as file:
        return file.read()


def marked_processes(proc: str) -> dict[int, Process]:
    """Processes with PVE_LAB_GPU_MIB in their environment, by pid."""
    found = {}
    for pid in filter(str.isdigit, os.listdir(proc)):
        try:
            pairs = (x.partition(b"=") for x in read(f"{proc}/{pid}/environ").split(b"\0"))
            environment = {key.decode(errors="replace"): value for key, _, value in pairs}
            if "PVE_LAB_GPU_MIB" not in environment:
                continue
            devices = environment.get("CUDA_VISIBLE_DEVICES")
            name = read(f"{proc}/{pid}/cmdline").split(b"\0")[0].decode(errors="replace")
            found[int(pid)] = {
                "pid": int(pid),
                "name": name,
                "mem": int(environment["PVE_LAB_GPU_MIB"]),
                "devices": None if devices is None else devices.decode(errors="replace"),
                "parent": int(read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()[1]),
                "size": int(read(f"{proc}/{pid}/statm").split()[1]),
            }
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile, or the number is none
    return found


def is_carrier(process: Process) -> bool:
    """Whether a process only passes its environment on."""
    # tmux's server calls itself "tmux: server", login shells "-bash".
    name = os.path.basename(process["name"]).lstrip("-").partition(":")[0]
    return name in CARRIERS or not name


def root_of(process: Process, marked: dict[int, Process]) -> int:
    """The topmost marked ancestor that is the same job; two jobs of one tmux are two."""
    while True:
        parent = marked.get(process["parent"])
        if parent is None or "tmux" in parent["name"]:
            return int(process["pid"])
        if (parent["mem"], parent["devices"]) != (process["mem"], process["devices"]):
            return int(process["pid"])
        process = parent


def live_apps(proc: str) -> list[Process]:
    """One process for each job that is marked."""
    marked = marked_processes(proc)
    largest: dict[int, Process] = {}
    for process in marked.values():
        if not is_carrier(process):
            root = root_of(process, marked)
            if root not in largest or process["size"] > largest[root]["size"]:
                largest[root] = process
    return list(largest.values())


def visible(devices: str | None, gpus: list[Gpu]) -> set[int]:
    """GPU numbers that CUDA_VISIBLE_DEVICES names, by number or (the beginning of a) UUID."""
    if devices is None:
        return {g["index"] for g in gpus}
    numbers = set()
    for word in (w.strip() for w in devices.split(",")):
        hits = [g["index"] for g in gpus if word.startswith("GPU-") and g["uuid"].startswith(word)]
        numbers |= {int(word)} if word.isdigit() else set(hits)
    return numbers


# ---- what is known of each GPU


def load() -> dict[str, Any]:
    """gpu.json with every field of every GPU filled in."""
    in_container = not os.path.exists(ON_HOST)
    with open(IN_CONTAINER if in_container else ON_HOST) as file:
        state: dict[str, Any] = json.load(file)
    for index, gpu in enumerate(state["gpus"]):
        gpu["index"] = index
        gpu.setdefault("uuid", f"GPU-{0x5EED0000 + index:08x}-1ab0-4c0d-8e00-{index:012x}")
    live = live_apps(HOST_PROC if in_container else "/proc")
    for gpu in state["gpus"]:
        here = [p for p in live if gpu["index"] in visible(p["devices"], state["gpus"])]
        gpu["apps"] = [*gpu.get("apps", []), *here]
        complete(gpu, state.get("driver", "550.54.15"))
        if in_container and state.get("hide_container_processes", True):
            gpu["apps"] = []
    return state


def complete(gpu: Gpu, driver: str) -> None:
    """Fill in what gpu.json does not say: an RTX 3090, busy when a process is on it."""
    busy = bool(gpu["apps"])
    defaults = {
        "name": "NVIDIA GeForce RTX 3090",
        "memory.total": 24576,
        "memory.used": 1,
        "utilization.gpu": 97 if busy else 0,
        "temperature.gpu": 71 if busy else 34,
        "power.draw": "318.42" if busy else "21.17",
        "power.limit": "350.00",
        "fan.speed": 30,
        "pci.bus_id": f"00000000:{gpu['index'] + 1:02X}:00.0",
    }
    for key, value in defaults.items():
        gpu.setdefault(key, value)
    gpu["memory.used"] += sum(app["mem"] for app in gpu["apps"])
    gpu["memory.free"] = gpu["memory.total"] - gpu["memory.used"]
    gpu["utilization.memory"] = gpu["utilization.gpu"] // 2
    gpu["driver_version"] = driver
    gpu["ecc.errors.uncorrected.volatile.total"] = gpu.get("ecc", "[N/A]")
    gpu["mig.mode.current"] = "[N/A]"
    if "mig" in gpu:
        gpu["mig.mode.current"] = "Enabled" if gpu["mig"] else "Disabled"
    gpu["pstate"] = "P2" if busy else "P8"
    gpu["compute_mode"] = "Default"
    gpu["timestamp"] = time.strftime("%Y/%m/%d %H:%M:%S.000")
    if gpu.get("mig"):  # a GPU in MIG mode reports no utilization of its own
        gpu["utilization.gpu"] = gpu["utilization.memory"] = "[N/A]"


# ---- csv

UNITS = {
    "memory.": " MiB",
    "used_": " MiB",
    "utilization.": " %",
    "power.": " W",
    "fan.": " %",
}
ALIASES = {"gpu_uuid": "uuid", "gpu_name": "name", "gpu_bus_id": "pci.bus_id"}
PROCESS_FIELDS = ("pid", "process_name", "used_memory", "used_gpu_memory")
# What nvidia-smi still knows of a GPU that fell off the bus, in the variant that goes on listing.
LOST_FIELDS = ("index", "uuid", "name", "pci.bus_id", "driver_version", "timestamp", "count")


def unit(name: str) -> str:
    """The unit that follows a field's value, with its blank."""
    return next((u for prefix, u in UNITS.items() if name.startswith(prefix)), "")


def query(gpus: list[Gpu], wanted: str, options: str, *, apps: bool) -> None:
    """--query-gpu and --query-compute-apps."""
    form = [x.strip() for x in options.split(",") if x.strip()]
    if not form:
        fail(2, '"--format=" is a required option, when using "--query-*".')
    if "csv" not in form:
        fail(2, "Invalid format.")
    fields = [x.strip() for x in wanted.split(",")]
    names = [ALIASES.get(field, field) for field in fields]
    known = {*(gpus[0] if gpus else ()), "count", *(PROCESS_FIELDS if apps else ())}
    for field, name in zip(fields, names, strict=True):
        if name not in known:
            fail(2, f'Field "{field}" is not a valid field to query.\n')
    if "noheader" not in form:
        heads = (
            f + (f" [{unit(n).strip()}]" if unit(n) else "")
            for f, n in zip(fields, names, strict=True)
        )
        say(", ".join(heads))
    for row in process_rows(gpus) if apps else gpus:
        row["count"] = len(gpus)
        say(", ".join(cell(row, name, bare="nounits" in form) for name in names))


def process_rows(gpus: list[Gpu]) -> list[Gpu]:
    """A row for each process on each GPU."""
    return [
        {**gpu, **dict(zip(PROCESS_FIELDS, (a["pid"], a["name"], a["mem"], a["mem"]), strict=True))}
        for gpu in gpus
        for a in gpu["apps"]
    ]


def cell(row: Gpu, name: str, *, bare: bool) -> str:
    """One value as csv shows it."""
    value = str(row[name])
    if row.get("lost") and name not in LOST_FIELDS:
        value = "[GPU is lost]"
    return value if bare or value.startswith("[") else value + unit(name)


# ---- listing, table, xml


def listing(gpus: list[Gpu]) -> None:
    """-L"""
    for gpu in gpus:
        say(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        for k in range(2 if gpu.get("mig") else 0):
            say(f"  MIG 3g.20gb     Device  {k}: (UUID: MIG-{gpu['uuid'][4:-1]}{k})")


def table(gpus: list[Gpu]) -> None:
    """What nvidia-smi shows without options."""
    bar = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    driver = gpus[0]["driver_version"] if gpus else ""
    say(time.strftime("%a %b %e %H:%M:%S %Y"))
    say("+" + "-" * 89 + "+")
    say(f"| NVIDIA-SMI {driver:<22} Driver Version: {driver:<15}CUDA Version: 12.4     |")
    say(bar)
    for g in gpus:
        ecc = str(g["ecc.errors.uncorrected.volatile.total"])
        say(f"| {g['index']:>3}  {g['name'][:33]:<34} |   {g['pci.bus_id']:<20} | {ecc:>20} |")
        power = f"{float(g['power.draw']):>8.0f}W / {float(g['power.limit']):>4.0f}W"
        memory = f"{g['memory.used']:>6}MiB / {g['memory.total']:>5}MiB"
        left = f"{g['fan.speed']:>2}%   {g['temperature.gpu']:>2}C    {g['pstate']}  {power}"
        say(f"| {left} | {memory} | {g['utilization.gpu']!s:>7}%      Default |")
        say(bar)
    say("| Processes:" + " " * 79 + "|")
    rows = [(gpu["index"], app) for gpu in gpus for app in gpu["apps"]]
    for index, app in rows:
        name, memory = app["name"][:34], f"{app['mem']:>7}MiB"
        say(f"| {index:>4}   N/A  N/A {app['pid']:>10}      C   {name:<36} {memory} |")
    if not rows:
        say("|  No running processes found" + " " * 62 + "|")


def xml(gpus: list[Gpu]) -> None:
    """-q -x"""
    say('<?xml version="1.0" ?>\n<nvidia_smi_log>')
    if gpus:
        say(f"\t<driver_version>{gpus[0]['driver_version']}</driver_version>")
    say(f"\t<attached_gpus>{len(gpus)}</attached_gpus>")
    for gpu in gpus:
        say("\n".join("\t" + line for line in xml_gpu(gpu)))
    say("</nvidia_smi_log>")


def xml_gpu(gpu: Gpu) -> list[str]:
    """The lines of one <gpu>."""
    memory = {key: f"{gpu[f'memory.{key}']} MiB" for key in ("total", "used", "free")}
    lines = [
        f'<gpu id="{gpu["pci.bus_id"]}">',
        f"\t<product_name>{gpu['name']}</product_name>",
        f"\t<uuid>{gpu['uuid']}</uuid>",
        f"\t<minor_number>{gpu['index']}</minor_number>",
        "\t<mig_mode>",
        f"\t\t<current_mig>{gpu['mig.mode.current'].strip('[]')}</current_mig>",
        "\t</mig_mode>",
        "\t<fb_memory_usage>",
        *(f"\t\t<{key}>{value}</{key}>" for key, value in memory.items()),
        "\t</fb_memory_usage>",
        "\t<utilization>",
        f"\t\t<gpu_util>{gpu['utilization.gpu']} %</gpu_util>",
        "\t</utilization>",
        "\t<processes>",
    ]
    for app in gpu["apps"]:
        lines += [
            "\t\t<process_info>",
            f"\t\t\t<pid>{app['pid']}</pid>",
            "\t\t\t<type>C</type>",
            f"\t\t\t<process_name>{app['name']}</process_name>",
            f"\t\t\t<used_memory>{app['mem']} MiB</used_memory>",
            "\t\t</process_info>",
        ]
    return [*lines, "\t</processes>", "</gpu>"]


# ---- start


def fail_as_a_whole(state: str) -> None:
    """Driver troubles that leave nothing to list."""
    if state == "no_driver":
        fail(
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
            "sure that the latest NVIDIA driver is installed and running.\n",
        )
    if state == "mismatch":
        text = "Failed to initialize NVML: Driver/library version mismatch\n"
        fail(18, text + "NVML library version: 550.54")
    if state == "no_devices":
        fail(6, "No devices were found")
    if state == "hung":
        time.sleep(3600)


def options_of(argv: list[str]) -> tuple[dict[str, str], list[str] | None]:
    """Options by name, and the GPUs of -i (None: all)."""
    options: dict[str, str] = {}
    ids: list[str] | None = None
    words = list(argv)
    while words:
        key, equals, value = words.pop(0).partition("=")
        if key in ("-i", "--id"):
            if not equals:
                value = words.pop(0) if words else ""
            ids = value.split(",")
        else:
            options[key] = value
    return options, ids


def main(argv: list[str]) -> None:
    """Answer one command line."""
    state = load()
    fail_as_a_whole(state.get("state", "ok"))
    options, ids = options_of(argv)
    gpus = [g for g in state["gpus"] if ids is None or str(g["index"]) in ids or g["uuid"] in ids]
    if not gpus:
        fail(6, "No devices were found")
    for gpu in gpus:
        if gpu.get("lost") is True:  # one lost GPU spoils the whole listing
            at = f"GPU{gpu['index']}: {gpu['pci.bus_id'][4:]}"
            text = f"Unable to determine the device handle for {at}: GPU is lost."
            fail(15, text + "  Reboot the system to recover this GPU\n")
    form = options.get("--format", "")
    if "--query-gpu" in options:
        query(gpus, options["--query-gpu"], form, apps=False)
    elif "--query-compute-apps" in options:
        query(gpus, options["--query-compute-apps"], form, apps=True)
    elif "-L" in options or "--list-gpus" in options:
        listing(gpus)
    elif "-q" in options:
        xml(gpus)
    elif set(options) - {"-x"}:
        text = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
        fail(2, text)
    else:
        table(gpus)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main(sys.argv[1:])
