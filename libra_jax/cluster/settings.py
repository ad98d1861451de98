"""Settings of every Ray that we start: in this process, on emulated hosts, by Slurm or Kubernetes scripts."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM: Mapping[str, bool] = {
    # An actor's own guard ends the actor's children, and spares the tracker that unlinks its shared memory.
    "kill_child_processes_on_worker_exit": False,
    "process_group_cleanup_enabled": False,
    # Otherwise Ray starts one idle worker per CPU, about 100 MB each.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""Ray's internal configuration (2.60): `_system_config` of `ray.init`, `--system-config` of `ray start`."""


def environment() -> dict[str, str]:
    """Returns the same settings as environment variables, for other starters of Ray. They apply to each host alone."""
    return {f"RAY_{name}": str(value).lower() for name, value in SYSTEM.items()} | {"RAY_USAGE_STATS_ENABLED": "0"}
