"""The view of this host that bubblewrap gives an agent without sandbox or container.

It is weaker than the run's sandbox: it has no limits of memory, processes or files, and no filter of system calls.
"""

from __future__ import annotations

import functools
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

from libra_jax.tools.sandbox import backends
from libra_jax.utils import scratch

_PROBE_SECONDS = 15.0
_log = logging.getLogger(__name__)


def own_processes(root: Path) -> tuple[str, ...]:
    """Returns the words that run a command in a view of this host with its own processes, and no capabilities.

    The view hides the processes of the run, which hold answers, and the temporary folders of runs, except `root`. Files
    of the host are read-only outside of temporary folders, because an agent could change the code of later rollouts.
    Shared memory is empty, because engines have theirs there. No words, with a warning, where bubblewrap does not work.
    """
    try:
        words = list(_private_view())
    except (OSError, subprocess.SubprocessError):
        _warn_exposed()
        return ()
    above = {root.parent.parent, Path("/tmp")}  # Ray's and sockets' folders are in /tmp if a path would be too long
    names = (f"{scratch.PREFIX}*", f"{scratch.RAY_PREFIX}*")
    for folder in {root.parent, *(folder for place in above for name in names for folder in place.glob(name))}:
        if folder.is_dir() and not folder.is_symlink():  # bubblewrap would fail on others
            words += ["--tmpfs", str(folder)]
    return (*words, "--bind", str(root), str(root), "--")


@functools.cache
def _warn_exposed() -> None:
    exposed = "Agents run as this run's user without bubblewrap, so commands of the model may read this run's memory"
    _log.warning("%s, answers included: %s", exposed, backends.INSTALL)


@functools.cache  # does not keep an error, because a machine under load may fail once
def _private_view() -> tuple[str, ...]:
    words = [shutil.which("bwrap") or "bwrap", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc"]
    words += ["--tmpfs", "/dev/shm"]
    for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        words += ["--bind-try", folder, folder]
    words += ["--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"]
    subprocess.run([*words, "--", "true"], check=True, capture_output=True, timeout=_PROBE_SECONDS)
    return tuple(words)
