"""Several places asked at the same time, and Ctrl-C meanwhile."""

import os
import signal
import subprocess
import sys

import pytest

from dflashctl.transport.parallel import at_once

# Both commands tell their process, then wait for ever; the second one to tell it interrupts.
INTERRUPTED = """
import os, signal, threading
from dflashctl.transport.child import Limits, Sinks, run_child
from dflashctl.transport.parallel import at_once

signal.signal(signal.SIGINT, signal.default_int_handler)  # however the tests were started
told = threading.Barrier(2, lambda: os.kill(os.getpid(), signal.SIGINT))

def ask(name):
    def note(data):
        print(data.decode(), end="", flush=True)
        told.wait()
    run_child(["bash", "-c", "echo $$; exec sleep 1000"], (), Sinks(note), Limits(name, None, None))

try:
    at_once(ask, ["a", "b", "never begun"], 2, "asking")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_answers_come_in_the_order_of_the_questions_and_nobody_asked_is_no_answer() -> None:
    assert at_once(lambda number: number * 2, [3, 1, 2], 2, "double") == [6, 2, 4]
    assert at_once(str, [], 8, "nobody") == []


def test_ctrl_c_ends_the_commands_of_all_threads() -> None:
    argv = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    *pids, last = done.stdout.split()
    assert (last, done.stderr) == ("interrupted", "")
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), signal.SIGCONT)
