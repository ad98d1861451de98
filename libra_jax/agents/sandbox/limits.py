"""What the code in a sandbox may use, and what a call of it came to."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from libra_jax import config, protocols

_LEAST = {"memory_mib": 64, "processes": 2, "files": 100, "input_bytes": 1024, "output_bytes": 256}
"""Below these not even an empty call works: Python itself takes 40 MiB of addresses, and a shell starts a process."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. A call that uses more fails, and says which limit it met.

    Attributes:
      seconds: of a call, by the clock on the wall: past them it is a time-out. Fewer than `task.tool_seconds`, or the
        agent loop's own deadline comes first, and costs the session its files.
      cpu_seconds: of a call, over all its processes.
      memory_mib: MiB of memory of all processes together, and of addresses of each.
      processes: processes and threads at once, besides the sandbox's own.
      file_mib: MiB of the largest file.
      workspace_mib: MiB of all files of the workspace; as much again of those in /tmp, and in /dev/shm.
      files: how many files each of these may hold.
      input_bytes: longest code, command or text of a call.
      output_bytes: most output of a call that is kept; what is more is cut out of its middle.
      start_seconds: how long a sandbox may take to start, and a call to wait for one.
    """

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    file_mib: int = 64
    workspace_mib: int = 128
    files: int = 20_000
    input_bytes: int = 262_144
    output_bytes: int = 16_384
    start_seconds: float = 20.0

    def of_call(self, seconds: float | None) -> float:
        """The seconds of a call that asks for so many; None asks for the usual.

        Raises:
          ConfigError: it asks for none, or for no end of them.
        """
        if seconds is None:
            return self.seconds
        config.check(0 < seconds < math.inf, "sandbox.seconds", f"must be positive and finite, not {seconds}")
        return seconds

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, name = getattr(self, item.name), f"sandbox.{item.name}"
            whole = item.type == "int"
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            config.check(right, name, f"must be a {'whole ' if whole else ''}number, not {value!r}")
            least = _LEAST.get(item.name, 0)
            config.check(math.isfinite(value) and value > 0, name, f"must be positive and finite, not {value}")
            config.check(value >= least, name, f"must be {least} or more, not {value}: less runs nothing at all")


@dataclass(frozen=True)
class Outcome:
    """What a call came to: data for the policy, whatever it was.

    Attributes:
      status: "failure" also where the code raised, exited with another status than 0, or met a limit.
      text: its output, standard error included, cut in the middle and marked; then, in brackets, what befell it.
      seconds: it took.
      lost: what of the session went with it: nothing (""), the interpreter's "state", or "all", its files included.
    """

    status: protocols.ToolStatus
    text: str
    seconds: float
    lost: str = ""


def cut(text: str, most: int) -> str:
    """The text, or its two ends with a mark between them that tells how many characters were left out."""
    if len(text) <= most:
        return text
    head, tail = (most + 1) // 2, most // 2
    return f"{text[:head]}\n[... {len(text) - most} characters left out ...]\n{text[len(text) - tail :]}"
