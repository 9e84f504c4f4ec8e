"""What a process with a thread that hangs can still do: say where each stands, and end."""

import gc
import os
import sys
import threading
import traceback


def stacks() -> str:
    """Return the stack of every Python thread, for the log of a run that hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    # A collection meanwhile can wait for ever for a lock of the interpreter that the call holds
    # (python/cpython issue 106883, mended in later releases).
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    for ident, frame in frames.items():
        parts.append(f"--- thread {names.get(ident, ident)}\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def end_process(error: BaseException) -> None:
    """End the process with this error: a thread inside a compiler cannot be woken or joined."""
    sys.stderr.write(f"error: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
