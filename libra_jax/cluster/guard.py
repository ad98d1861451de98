"""What a process leaves behind when it is killed with -9: a shell that waits for that, ends it, and ends itself.

A killed process runs no clean-up of its own, and the kernel's parent-death signal reaches only children that ask for
it, which processes made by somebody else's code do not. The guard is a shell blocked on a pipe whose other end only
the guarded process holds: the pipe closes when that process is gone, however it went.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

# Python's resource trackers ignore the first signal and are spared the second: they end by themselves once nobody uses
# them, and unlink the shared memory that the others left. A group is killed member by member for their sake, twice,
# because one that is killed may just have made another. Removing is tried again: a dying process may write one more
# file.
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
    """Armed from the start; `fire` does now what the death of this process would."""

    def __init__(self, processes: Sequence[int], directory: str = "") -> None:
        """Args:
        processes: process ids to kill; negative ones are process groups.
        directory: removed afterwards, if not empty.
        """
        command = ["/bin/sh", "-c", _SCRIPT, "libra-guard", directory, *map(str, processes)]
        # A session of its own: neither Ctrl-C nor the killing of the guarded process's group may end it first.
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
        """Kills and removes now; False if that is not over after `seconds`."""
        self._close_pipe()
        try:
            self._shell.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
