"""Cases for the runner of launch/gpu_check.py: ones that raise, die, hang, or leave a child behind."""

import os
import signal
import subprocess
import sys
import time

from gpu import rows


def passes(bench: rows.Bench) -> rows.Outcome:
    return rows.Outcome({"process": os.getpid()})


def raises(bench: rows.Bench) -> rows.Outcome:
    raise ValueError("of no use")


def dies(bench: rows.Bench) -> rows.Outcome:
    os.kill(os.getpid(), signal.SIGSEGV)
    return rows.Outcome({})


def hangs(bench: rows.Bench, pids: str) -> rows.Outcome:
    """Hangs with a child that ignores the end of its parent, and notes both process ids."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pids, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return rows.Outcome({})


def exceeds(bench: rows.Bench) -> rows.Outcome:
    return rows.Outcome({"error": 0.5}, "0.5 is too much")


def has_nothing(bench: rows.Bench) -> rows.Outcome:
    raise rows.LeftOut("there is one device")
