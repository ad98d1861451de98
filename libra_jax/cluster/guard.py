"""Cleans up after a process that was killed with -9: a shell waits for its end, ends its children, then itself.

A killed process runs no clean-up of its own. The kernel's parent-death signal reaches only children that ask for it,
and processes started by other libraries do not. The guard is a shell that blocks on a pipe; only the guarded process
holds the other end. The pipe closes when that process is gone, in any way. Ray's own clean-up is turned off for it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

RAY_SETTINGS: Mapping[str, bool] = {
    # An actor's own guard ends the actor's children, and spares the tracker that unlinks its shared memory.
    "kill_child_processes_on_worker_exit": False,
    "process_group_cleanup_enabled": False,
    # Otherwise Ray starts one idle worker per CPU, about 100 MB each.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""Ray's internal configuration (2.60) wherever we start Ray: `_system_config` of `ray.init`, `--system-config` of `ray
start`."""

RAY_ENVIRONMENT: Mapping[str, str] = {
    **{f"RAY_{name}": str(value).lower() for name, value in RAY_SETTINGS.items()},
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""`RAY_SETTINGS` as environment variables, for other starters of Ray. They apply to one host."""

# Python's resource trackers ignore SIGTERM and are spared SIGKILL: they end by themselves when no one uses them, and
# unlink the shared memory that the others left. For their sake, a group is killed process by process, and twice,
# because a process may start another just before it is killed. Removal is retried, because a dying process may write
# one more file.
_SCRIPT = """
kill_group() {
  group=$1
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    pid=${line%% *}
    set -- ${line##*) }
    [ "$3" = "$group" ] || continue
    grep -qa resource_tracker "/proc/$pid/cmdline" 2>/dev/null || kill -KILL "$pid" 2>/dev/null
  done
}
read -r _
directory=$1; shift
for process in "$@"; do kill -TERM "$process" 2>/dev/null; done
tenths=0
while [ $tenths -lt 30 ]; do
  running=
  for process in "$@"; do kill -0 "$process" 2>/dev/null && running=1; done
  [ -n "$running" ] || break
  sleep 0.1
  tenths=$((tenths + 1))
done
[ -n "$running" ] && for process in "$@"; do
  case $process in
    -*) kill_group "${process#-}"; kill_group "${process#-}" ;;
    *) kill -KILL "$process" 2>/dev/null ;;
  esac
done
[ -z "$directory" ] && exit
for attempt in 1 2 3 4 5; do rm -rf -- "$directory" 2>/dev/null && exit; sleep 1; done
"""


class Guard:
    """A guard, armed from the start. `fire` triggers it at once, as the death of this process would."""

    def __init__(self, processes: Sequence[int], directory: str = "") -> None:
        """Starts the shell.

        Args:
          processes: ids of the processes to kill; negative ids are process groups.
          directory: folder to remove afterwards, if not empty.
        """
        command = ["/bin/sh", "-c", _SCRIPT, "libra-guard", directory, *map(str, processes)]
        # Its own session: neither Ctrl-C nor a kill of the guarded process's group may end the guard first.
        self._shell = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        # A child forked without exec would hold the pipe open after this process is gone.
        os.register_at_fork(after_in_child=self._close_pipe)
        self.pid = self._shell.pid

    def _close_pipe(self) -> None:
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()

    def fire(self, seconds: float) -> bool:
        """Kills and removes now; returns False if that takes longer than `seconds`."""
        # The closed pipe is the signal: the shell reads its end and begins to kill.
        self._close_pipe()
        try:
            self._shell.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
