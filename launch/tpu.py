"""Runs a script for gcloud that trains on a pod of Cloud TPU VMs, from the queued resource to the driver.

  python launch/tpu.py --config=configs/mine.py --project=P --zone=us-east5-b --accelerator_type=v6e-16 \\
      --runtime_version=v2-alpha-tpuv6e --rollout_hosts=gpu-0,gpu-1 --workdir=/shared/mine --dry_run   # the script

Rollout is on the hosts that --rollout_hosts names, in the order of their use, reached by ssh: GPU machines, or TPU VMs
with vLLM's own TPU build. The hosts are those of `config.cluster.accelerators_per_host`. Every host has the repository
at --repository, with its environment in .venv (--setup may put it there), and sees --workdir on a shared file system.
The hosts belong to the run alone: a Ray that an earlier start left on them is stopped. On GKE, launch/kubernetes.py
takes TPU hosts.

No TPU has run it: neither training on a pod, nor rollout on GPUs beside it or on vLLM's TPU build. Its commands were
run against doubles of gcloud and ssh. The Ray backend still asks every host for the accelerators of
`trainer.platform`, so GPU machines beside a pod would join and not be used.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support import cli, job_flags, rendering

from absl import flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import hosts

ONE_CORE = ("v5litepod", "v6e")
"""Generations whose types count chips; the other generations count TensorCores, two a chip (Cloud TPU's
documentation)."""

flags.mark_flag_as_required("config")
_NAME = flags.DEFINE_string(
    "name", None, "Name of the queued resource and its node; default <config>-<hash of config>."
)
_PROJECT = flags.DEFINE_string("project", None, "Google Cloud project.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the pod.")
_TYPE = flags.DEFINE_string("accelerator_type", None, "Type of the pod (v6e-16).")
_RUNTIME = flags.DEFINE_string("runtime_version", None, "TPU software version (v2-alpha-tpuv6e).")
_CREATE = flags.DEFINE_string("create_flags", "", "Further flags of queued-resources create, in one string (--spot).")
_ROLLOUT_HOSTS = flags.DEFINE_list("rollout_hosts", [], "Hosts that roll out, as ssh knows them.")
_REPOSITORY = flags.DEFINE_string("repository", "libra-jax", "Folder of the repository on every host.")
_SETUP = job_flags.setup()
_WAIT_MINUTES = flags.DEFINE_integer("wait_minutes", 720, "Minutes to wait for the pod.", lower_bound=1)
_DELETE = flags.DEFINE_bool("delete", False, "Give the pod back at the end, however it ends.")
_OUTPUT = job_flags.output()
flags.adopt_module_key_flags(job_flags)  # so that --help shows them


def main() -> int | None:
    run = job_flags.run()
    run.validate()
    workdir = f"--workdir={job_flags.WORKDIR.value}"
    script = _script(run.config, ["python", "launch/train.py", *run.arguments, workdir])
    job_flags.show(script, _OUTPUT.value)
    if job_flags.DRY_RUN.value:
        return None
    for program in ("gcloud", "ssh", "openssl"):
        if shutil.which(program) is None:
            raise protocols.DataError(f"there is no {program} on the PATH; install it, or give --dry_run")
    return subprocess.run(["bash", "-c", script], check=False).returncode  # the script bounds its own waits


def _script(config: config_lib.RunConfig, command: Sequence[str]) -> str:
    for flag in (_PROJECT, _ZONE, _TYPE, _RUNTIME, job_flags.WORKDIR):
        if not flag.value:
            raise protocols.ConfigError(f"--{flag.name}: is needed: {flags.FLAGS[flag.name].help}")
    workdir = job_flags.WORKDIR.value
    if not Path(workdir).is_absolute():
        raise protocols.ConfigError(f"--workdir={workdir}: must be absolute: every host sees it there")
    for name, text in (("setup", _SETUP.value), ("create_flags", _CREATE.value)):
        job_flags.check_text(name, text, "have each host read it from a file of its own")
    try:
        create = shlex.split(_CREATE.value)
    except ValueError as error:
        raise protocols.ConfigError(f"--create_flags: cannot be read as a shell would ({error})") from error
    return rendering.shell(
        "tpu.sh.jinja",
        name=_NAME.value or re.sub(r"[^a-z0-9]+", "-", f"{config.name}-{config_lib.digest(config)}".lower()),
        project=_PROJECT.value,
        zone=_ZONE.value,
        accelerator_type=_TYPE.value,
        runtime_version=_RUNTIME.value,
        hosts=_check_hosts(config),
        wait_seconds=60 * _WAIT_MINUTES.value,
        repository=_REPOSITORY.value,
        setup=_SETUP.value,
        delete=_DELETE.value,
        create=create,
        rollout_hosts=_ROLLOUT_HOSTS.value,
        command=command,
    )


def _check_hosts(config: config_lib.RunConfig) -> int:
    """Returns the number of the pod's hosts.

    Raises:
      ConfigError: the pod, the rollout hosts and the run do not match.
    """
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
            f"--accelerator_type={_TYPE.value}: has {chips} chips, and the run's mesh takes {len(training)} "
            f"host{'s' * (len(training) > 1)} of {config.cluster.accelerators_per_host} (config.trainer, "
            f"config.cluster.accelerators_per_host): {wanted}"
        )
    if len(_ROLLOUT_HOSTS.value) != len(rollout):
        raise protocols.ConfigError(
            f"--rollout_hosts: names {len(_ROLLOUT_HOSTS.value)}, and the run rolls out on {len(rollout)} "
            "(config.rollout.tensor_parallel, config.cluster.accelerators_per_host)"
        )
    return len(training)


cli.run(main, needs_config=True)
