"""How every Ray of ours is set, whoever starts it: this process, emulated hosts, Slurm's or Kubernetes' scripts."""

from __future__ import annotations

from collections.abc import Mapping

SYSTEM: Mapping[str, bool] = {
    # An actor's own guard ends what that started, and spares the tracker that unlinks its shared memory.
    "kill_child_processes_on_worker_exit": False,
    "process_group_cleanup_enabled": False,
    # Workers nobody has asked for, one a CPU, a hundred MB each.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""Of Ray's own configuration (2.60): `_system_config` of `ray.init`, `--system-config` of `ray start`."""


def environment() -> dict[str, str]:
    """The same as variables, for whatever starts Ray: they count on each host for itself."""
    return {f"RAY_{name}": str(value).lower() for name, value in SYSTEM.items()} | {"RAY_USAGE_STATS_ENABLED": "0"}
