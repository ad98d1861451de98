"""Submits a run to Slurm: Ray over its hosts by Ray's symmetric start, the driver on the first one.

  python launch/slurm.py --config=configs/quickstart.py --workdir=runs/mine --time=1:00:00 --dry_run   # the script
  python launch/slurm.py --config=configs/qwen3_1p7b_8gpu.py --config.cluster.accelerators_per_host=4 \
      --train_partition=h100 --rollout_partition=l40s --time=1-00:00:00

How many hosts, and what of each, comes from the config (`cluster.accelerators_per_host`; 0: one host). The job's number
goes to standard output, and everything else to standard error. The workdir, the folder it is submitted from and this
repository have to be where all hosts see them.

Told by Slurm that it has to end (--grace seconds before that), a run saves a checkpoint and the job queues up again;
killed without notice, it goes on from the last one. `<workdir>/logs/latest` has the logs of the last attempt: the
driver's in train.log, each host's, and Ray's own where the run did not finish.

Run with Slurm 22.05, without GPUs: on one node, and over two partitions (a heterogeneous job) on two hosts emulated by
network namespaces. Not run: GPUs, several machines, pyxis.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import overrides
import slurm_job
from absl import flags
from ml_collections import config_flags

import checks
import cli
import workdirs
from libra_jax import config as libra_config
from libra_jax import protocols

COMMAND_SECONDS = 30.0

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's config file.", lock_config=True)
_PLAN = flags.DEFINE_string("plan", None, "Plan of launch/plan.py to lay the run out by.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes; default runs/<config>-<hash of config>.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the script; submit nothing.")
_PARTITION = flags.DEFINE_string("partition", "", "Partition of all hosts; default: Slurm's own.")
_TRAIN = flags.DEFINE_string("train_partition", "", "Partition of the hosts that train; with --rollout_partition.")
_ROLLOUT = flags.DEFINE_string("rollout_partition", "", "Partition of the hosts that roll out.")
_TIME = flags.DEFINE_string("time", "", "Longest time, as Slurm writes it: 90 (minutes), 12:00:00, 2-00:00:00.")
_ACCOUNT = flags.DEFINE_string("account", "", "Account to charge.")
_QOS = flags.DEFINE_string("qos", "", "Quality of service.")
_CONSTRAINT = flags.DEFINE_string("constraint", "", "Features that hosts must have.")
_NODELIST = flags.DEFINE_string("nodelist", "", "Hosts to take.")
_EXCLUDE = flags.DEFINE_string("exclude", "", "Hosts to leave out.")
_SBATCH = flags.DEFINE_multi_string("sbatch", [], "Another option of sbatch, like --sbatch=--mem=64G; may be repeated.")
_CPUS = flags.DEFINE_integer("cpus_per_host", 0, "Cores of each host; 0: as the partition has it.", lower_bound=0)
_EXCLUSIVE = flags.DEFINE_bool("exclusive", False, "Take whole hosts, which no other job shares.")
_REQUEUE = flags.DEFINE_bool("requeue", True, "Queue up again after a pre-emption, or when the time was over.")
_GRACE = flags.DEFINE_integer(
    "grace", 120, "Seconds before its end at which the run is told to stop.", lower_bound=1, upper_bound=65_535
)
_ENVIRONMENT = flags.DEFINE_multi_string(
    "environment", [], "NAME=VALUE, or the NAME of a variable that is taken from yours (a secret); may be repeated."
)
_IMAGE = flags.DEFINE_string("container_image", "", "Image that pyxis runs each host's part in.")
_MOUNTS = flags.DEFINE_string("container_mounts", "", "What pyxis mounts there, as SOURCE:TARGET,...")
_SETUP = flags.DEFINE_string("setup", "", "Shell line before the run, like 'module load cuda'.")
_PYTHON = flags.DEFINE_string("python", "", "Python of the hosts; default: this one, and in a container python3.")


def main() -> None:
    config = _config()
    folder = Path.cwd()
    workdir = folder / (_WORKDIR.value or workdirs.default(config))
    job = slurm_job.make(config, _settings(), arguments=_arguments(), folder=folder, workdir=workdir, known=os.environ)
    checks.validate(config, need_weights=False)
    _check_partitions(job)
    script = slurm_job.render(job)
    if _DRY_RUN.value:
        print(script, end="")
        return
    if not shutil.which("sbatch"):
        raise protocols.ConfigError(
            "sbatch is not on PATH: this machine cannot submit to Slurm. Go to a login node of the cluster, or give "
            "--dry_run to see the script"
        )
    workdirs.open_workdir(config, str(workdir))  # refuses one that another config or a running job has
    file = workdir / "slurm.sbatch"
    (workdir / "logs").mkdir(exist_ok=True)
    file.write_text(script)
    number = _run("sbatch", "--parsable", str(file)).strip().split(";")[0]
    print(f"{config.name} is submitted: {job.title}. Logs: {workdir / 'logs' / 'latest'}", file=sys.stderr)
    print(number)


def _config() -> libra_config.RunConfig:
    """The run's, with the job's Ray for its cluster."""
    values = overrides.values(flags.FLAGS["config"], _PLAN.value)
    if values["cluster"]["address"]:
        raise protocols.ConfigError("config.cluster.address: the job starts a Ray of its own; leave it empty")
    values["cluster"].update(backend="ray", address="auto")
    return libra_config.parse(libra_config.RunConfig, values)


def _arguments() -> list[str]:
    """Of launch/train.py: as they were given here, and the job's Ray, which each attempt finds by RAY_ADDRESS."""
    flag, ours = flags.FLAGS["config"], {"cluster.backend": "ray", "cluster.address": "auto"}
    given = [argument for argument in overrides.arguments(flag) if not argument.startswith("--config.cluster.backend=")]
    settings = sorted([*given, *(f"--config.{name}={value}" for name, value in ours.items())])
    plan = [f"--plan={Path(_PLAN.value).resolve()}"] if _PLAN.value is not None else []
    return [f"--config={config_flags.get_config_filename(flag)}", *settings, *plan]


def _settings() -> slurm_job.Settings:
    named = {
        "--account": _ACCOUNT.value,
        "--qos": _QOS.value,
        "--constraint": _CONSTRAINT.value,
        "--exclude": _EXCLUDE.value,
    }
    return slurm_job.Settings(
        partition=_PARTITION.value,
        train_partition=_TRAIN.value,
        rollout_partition=_ROLLOUT.value,
        time=_TIME.value,
        options=(*(f"{name}={shlex.quote(value)}" for name, value in named.items() if value), *_SBATCH.value),
        nodelist=_NODELIST.value,
        cpus_per_host=_CPUS.value,
        exclusive=_EXCLUSIVE.value,
        requeue=_REQUEUE.value,
        grace=_GRACE.value,
        environment=tuple(_ENVIRONMENT.value),
        container_image=_IMAGE.value,
        container_mounts=_MOUNTS.value,
        setup=_SETUP.value,
        python=_PYTHON.value or ("python3" if _IMAGE.value else sys.executable),
    )


def _check_partitions(job: slurm_job.Job) -> None:
    """Compares with what Slurm has, where it can be asked: a dry run may be anywhere, and sbatch has the last word."""
    if not shutil.which("sinfo"):
        return
    try:
        shown = _run("sinfo", "--noheader", "--format=%P|%D|%G")
    except protocols.LibraError as error:
        print(f"Partitions were not checked: {error}", file=sys.stderr)
        return
    slurm_job.check_partitions(job.parts, slurm_job.parse_partitions(shown))


def _run(*command: str) -> str:
    """A command of Slurm's, and what it prints.

    Raises:
      LibraError: it fails, or does not answer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise protocols.LibraError(
            f"{command[0]} did not answer within {COMMAND_SECONDS:g} s: Slurm's controller cannot be reached"
        ) from None
    if done.returncode:
        why = " ".join(re.sub(rf"{command[0]}: (error: )?", "", done.stderr).split()) or f"status {done.returncode}"
        raise protocols.LibraError(f"{command[0]} refused: {why}")
    return done.stdout


if __name__ == "__main__":
    cli.run(main, default_config="configs/quickstart.py", interrupted="interrupted; what was submitted stays so.")
