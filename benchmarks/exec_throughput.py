"""Three figures of bytes through a container: stdout, stderr first, and a digest-equal 200 MB.

Run it on hosts.yaml of a lab or a real site, from the directory that holds it:
    python -m benchmarks.exec_throughput HOST/VMID
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

from dflashctl.inventory import find_inventory, load_inventory
from dflashctl.operations.execute import ExecuteRequest, execute
from dflashctl.transport import Transport, connect

MB = 1_000_000
SOURCE = "head -c {size} /dev/zero | tr '\\0' x"


def timed(way: Transport, script: str) -> tuple[float, int, int, str]:
    """Return seconds, bytes of stdout and stderr, and the sha256 of stdout."""
    digest, num_bytes = hashlib.sha256(), [0, 0]

    def on_stdout(data: bytes) -> None:
        digest.update(data)
        num_bytes[0] += len(data)

    def on_stderr(data: bytes) -> None:
        num_bytes[1] += len(data)

    started_s = time.monotonic()
    status = execute(way, ExecuteRequest(["bash", "-c", script]), on_stdout, on_stderr)
    if status != 0:
        raise SystemExit(f"the command ended with {status}")
    return time.monotonic() - started_s, num_bytes[0], num_bytes[1], digest.hexdigest()


def main(limit: str) -> None:
    """Print the three figures."""
    place = load_inventory(find_inventory(None, Path.cwd(), os.environ)).one([limit])
    way = connect(place)
    try:
        seconds, out, _, _ = timed(way, SOURCE.format(size=30 * MB))
        print(f"stdout          {out / MB:.0f} MB in {seconds:.2f} s")
        script = f"head -c {5 * MB} /dev/zero >&2; echo done"
        seconds, _, err, _ = timed(way, script)
        print(f"stderr first    {err / MB:.0f} MB in {seconds:.2f} s")
        seconds, out, _, found = timed(way, SOURCE.format(size=200 * MB))
        equal = found == hashlib.sha256(b"x" * (200 * MB)).hexdigest()
        print(f"digest {'equal' if equal else 'DIFFERS'}    {out / MB:.0f} MB in {seconds:.2f} s")
    finally:
        way.close()
    sys.exit(0 if equal else 7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", metavar="HOST/VMID")
    main(parser.parse_args().place)
