"""Renders a run that trains on a pod of Cloud TPU VMs: a script for gcloud, from the queued resource to the driver.

  python launch/tpu.py --config=configs/mine.py --project=P --zone=us-east5-b --accelerator_type=v6e-16 \\
      --runtime_version=v2-alpha-tpuv6e --rollout_hosts=gpu-0,gpu-1 --workdir=/shared/mine

Rollout is on the hosts that --rollout_hosts names, in the order of their use, reached by ssh: GPU machines, or TPU VMs
with vLLM's own TPU build. Hosts are those of `config.cluster.accelerators_per_host`; every one has the repository, with
its environment in .venv, at --repository (--setup may put it there), and sees --workdir on a file system of all. They
are the run's own: a Ray that an earlier start left on them is stopped.
On GKE, launch/kubernetes.py takes TPU hosts.

The script is printed; --nodry_run runs it. No TPU has seen it: not run, neither training on a pod nor rollout on GPUs
beside it nor on vLLM's TPU build. Its commands were run against doubles of gcloud and ssh. The Ray backend still asks
every host for the accelerators of `trainer.platform`, so GPU machines beside a pod would join and not be used.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import overrides
from absl import flags
from ml_collections import config_flags

import checks
import cli
from libra_jax import config as libra_config
from libra_jax import protocols
from libra_jax.cluster import hosts

BODY = Path(__file__).parent / "templates" / "tpu.sh"

ONE_CORE = ("v5litepod", "v6e")
"""Generations whose types count chips; the others' count TensorCores, two a chip (Cloud TPU's documentation)."""

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config file; the hosts have it too.", lock_config=True)
flags.mark_flag_as_required("config")
_NAME = flags.DEFINE_string("name", None, "Of the queued resource and its node; default <config>-<hash of config>.")
_PROJECT = flags.DEFINE_string("project", None, "Google Cloud project.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the pod.")
_TYPE = flags.DEFINE_string("accelerator_type", None, "Type of the pod (v6e-16).")
_RUNTIME = flags.DEFINE_string("runtime_version", None, "TPU software version (v2-alpha-tpuv6e).")
_CREATE = flags.DEFINE_string("create_flags", "", "Further flags of queued-resources create, in one string (--spot).")
_ROLLOUT_HOSTS = flags.DEFINE_list("rollout_hosts", [], "Hosts that roll out, as ssh knows them.")
_REPOSITORY = flags.DEFINE_string("repository", "libra-jax", "Folder of the repository on every host.")
_SETUP = flags.DEFINE_string("setup", "", "Shell command run on every host first.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, which every host sees.")
_WAIT_MINUTES = flags.DEFINE_integer("wait_minutes", 720, "Minutes to wait for the pod.", lower_bound=1)
_DELETE = flags.DEFINE_bool("delete", False, "Give the pod back at the end, however it ends.")
_OUTPUT = flags.DEFINE_string("output", None, "File to write; default: standard output.")
_DRY_RUN = flags.DEFINE_bool("dry_run", True, "Only print the script.")


def main() -> int | None:
    flag = flags.FLAGS["config"]
    file = config_flags.get_config_filename(flag)
    config = libra_config.parse(libra_config.RunConfig, overrides.values(flag))
    given = overrides.arguments(flag)  # first: what is wrong with a secret would be told in an error
    checks.validate(config, need_weights=False)
    command = ["python", "launch/train.py", f"--config={file}", *given, "--config.cluster.address=auto"]
    command.append(f"--workdir={_WORKDIR.value}")
    script = _script(config, command)
    if _OUTPUT.value:
        cli.check_output(Path(_OUTPUT.value))
        Path(_OUTPUT.value).write_text(script)
    elif _DRY_RUN.value:
        print(script, end="")
    if _DRY_RUN.value:
        return None
    for program in ("gcloud", "ssh", "openssl"):
        if shutil.which(program) is None:
            raise protocols.DataError(f"--nodry_run: there is no {program} on the PATH; install it")
    return subprocess.run(["bash", "-c", script], check=False).returncode  # the script bounds its own waits


def _script(config: libra_config.RunConfig, command: Sequence[str]) -> str:
    for flag in (_PROJECT, _ZONE, _TYPE, _RUNTIME, _WORKDIR):
        if not flag.value:
            raise protocols.ConfigError(f"--{flag.name}: is needed: {flags.FLAGS[flag.name].help}")
    if not Path(_WORKDIR.value).is_absolute():
        raise protocols.ConfigError(f"--workdir={_WORKDIR.value}: must be absolute: every host sees it there")
    name = _NAME.value or re.sub(r"[^a-z0-9]+", "-", f"{config.name}-{libra_config.digest(config)}".lower())
    variables = {
        "name": name,
        "project": _PROJECT.value,
        "zone": _ZONE.value,
        "accelerator_type": _TYPE.value,
        "runtime_version": _RUNTIME.value,
        "hosts": _check_hosts(config),
        "wait_seconds": 60 * _WAIT_MINUTES.value,
        "repository": _REPOSITORY.value,
        "setup": _SETUP.value,
        "delete": "1" if _DELETE.value else "",
    }
    try:
        create = shlex.split(_CREATE.value)
    except ValueError as error:
        raise protocols.ConfigError(f"--create_flags: cannot be read as a shell would ({error})") from error
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    lines += [f"{key}={shlex.quote(str(value))}" for key, value in variables.items()]
    lines += [
        _array("create", create),
        _array("rollout_hosts", _ROLLOUT_HOSTS.value),
        _array("command", list(command)),
    ]
    return "\n".join([*lines, "", BODY.read_text()])


def _check_hosts(config: libra_config.RunConfig) -> int:
    """Hosts of the pod."""
    layout = hosts.layout(config)
    if config.trainer.platform != "tpu" or layout is None:
        raise protocols.ConfigError(
            "config.trainer.platform, config.cluster.accelerators_per_host: a pod trains on tpu, and its hosts have so "
            "many chips each (4 on most types)"
        )
    matched = re.fullmatch(r"(v\d+[a-z]*)-(\d+)", _TYPE.value)
    if matched is None:
        raise protocols.ConfigError(f"--accelerator_type={_TYPE.value}: is no type of a TPU pod, like v6e-16 or v4-32")
    chips = int(matched[2]) // (1 if matched[1] in ONE_CORE else 2)
    training, rollout = layout.of_role("training"), layout.of_role("rollout")
    wanted = len(training) * config.cluster.accelerators_per_host
    if chips != wanted:
        raise protocols.ConfigError(
            f"--accelerator_type={_TYPE.value}: has {chips} chips, and the run's mesh takes {len(training)} hosts of "
            f"{config.cluster.accelerators_per_host} (config.trainer, config.cluster.accelerators_per_host): {wanted}"
        )
    if len(_ROLLOUT_HOSTS.value) != len(rollout):
        raise protocols.ConfigError(
            f"--rollout_hosts: names {len(_ROLLOUT_HOSTS.value)}, and the run rolls out on {len(rollout)} "
            "(config.rollout.tensor_parallel, config.cluster.accelerators_per_host)"
        )
    return len(training)


def _array(name: str, values: list[str]) -> str:
    """A line an entry, so that a changed setting is a changed line."""
    return "\n".join([f"{name}=(", *(f"  {shlex.quote(value)}" for value in values), ")"])


cli.run(main)
