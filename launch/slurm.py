"""Submits a run to Slurm: Ray on each of its hosts, the driver on the first host.

  python launch/slurm.py --config=configs/quickstart.py --workdir=runs/mine --time=1:00:00 --dry_run   # the script
  python launch/slurm.py --config=configs/qwen3_1p7b_8gpu.py --config.cluster.accelerators_per_host=4 \\
      --train_partition=h100 --rollout_partition=l40s --time=1-00:00:00

The number of hosts, and their resources, come from the config (`cluster.accelerators_per_host`; 0: one host). The job's
number goes to standard output, and everything else to standard error. All hosts have to see the workdir, this
repository and the folder that the job is submitted from.

--grace seconds before Slurm ends the job, the run saves a checkpoint, and the job queues up again. If the run lost a
host that it needs, the job also queues up again, --retries times. A run that is killed without notice goes on from its
last checkpoint. `<workdir>/logs/latest` has the logs of the last attempt: the driver's in train.log, each host's, and
Ray's own if the run did not finish.

Run with Slurm 22.05, without GPUs: on one node, and over two partitions (a heterogeneous job) on two hosts emulated
by network namespaces. Not run: GPUs, several machines, pyxis.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from support import cli, job_flags, slurm_job

from absl import flags

from libra_jax import protocols
from libra_jax.build import workdirs

COMMAND_SECONDS = 30.0

_PARTITION = flags.DEFINE_string("partition", "", "Partition of all hosts; default: Slurm's own.")
_TRAIN = flags.DEFINE_string("train_partition", "", "Partition of the hosts that train; with --rollout_partition.")
_ROLLOUT = flags.DEFINE_string("rollout_partition", "", "Partition of the hosts that roll out.")
_TIME = flags.DEFINE_string("time", "", "Longest time, as Slurm writes it: 90 (minutes), 12:00:00, 2-00:00:00.")
_ACCOUNT = flags.DEFINE_string("account", "", "Account to charge.")
_QOS = flags.DEFINE_string("qos", "", "Quality of service.")
_CONSTRAINT = flags.DEFINE_string("constraint", "", "Features that hosts must have.")
_NODELIST = flags.DEFINE_string("nodelist", "", "Hosts to take.")
_EXCLUDE = flags.DEFINE_string("exclude", "", "Hosts to leave out.")
_SBATCH = flags.DEFINE_multi_string(
    "sbatch", [], "Another option of sbatch, like --sbatch=--reservation=mine; may be repeated."
)
_CPUS = job_flags.cpus_per_host("6 for each accelerator and 1 more; 1 for each part of a CPU")
_MEMORY = flags.DEFINE_string("memory", "", "Memory of each host, like 64G; default: by the model's size. 0: all.")
_EXCLUSIVE = flags.DEFINE_bool("exclusive", False, "Take whole hosts, which no other job shares.")
_REQUEUE = flags.DEFINE_bool(
    "requeue", True, "Queue up again after a pre-emption, a lost host, or the end of the time."
)
_GRACE = job_flags.grace()
_RETRIES = job_flags.retries("; pre-emptions and the end of its time do not count")
_ENVIRONMENT = job_flags.environment(", or the NAME of a variable that is taken from yours (a secret)")
_IMAGE = job_flags.image()
_MOUNTS = flags.DEFINE_string("container_mounts", "", "What pyxis mounts there, as SOURCE:TARGET,...")
_SETUP = job_flags.setup()
_PYTHON = flags.DEFINE_string("python", "", "Python of the hosts; default: this one, and in a container python3.")
flags.adopt_module_key_flags(job_flags)  # so that --help shows them


def main() -> None:
    run = job_flags.run()
    config, folder = run.config, Path.cwd()
    workdir = folder / (job_flags.WORKDIR.value or workdirs.default(config))
    workdirs.check_place(workdir)
    # Compared only if Slurm can be asked: a dry run may be on any machine, and sbatch decides in any case.
    partitions: tuple[slurm_job.Partition, ...] = ()
    if shutil.which("sinfo"):
        try:
            partitions = slurm_job.parse_partitions(_run("sinfo", "--noheader", "--format=%P|%D|%G|%c|%m"))
        except protocols.LibraError as error:
            print(f"Partitions were not checked: {error}", file=sys.stderr)
    settings, place = _settings(run), {"folder": folder, "workdir": workdir}
    job = slurm_job.make(
        config, settings, arguments=run.arguments, known=os.environ, size=run.host_size(), there=partitions, **place
    )
    run.validate()
    if partitions:
        slurm_job.check_partitions(job.parts, partitions)
    script = slurm_job.render(job)
    if job_flags.DRY_RUN.value:
        print(script, end="")
        return
    if not shutil.which("sbatch"):
        raise protocols.ConfigError(
            "sbatch is not on PATH: this machine cannot submit to Slurm. Go to a login node of the cluster, or give "
            "--dry_run to see the script"
        )
    number = _submit(run, workdir, script)
    print(f"{config.name} is submitted: {job.title}. Logs: {workdir / 'logs' / 'latest'}", file=sys.stderr)
    print(number)


def _submit(run: job_flags.Run, workdir: Path, script: str) -> str:
    """Submits the script and returns the job's number. Removes a workdir that was made for a job that Slurm refuses.

    Raises:
      ConfigError: another config or a running job has the workdir.
      LibraError: Slurm refuses.
    """
    existed = workdir.exists()
    if not job_flags.WORKDIR.value:
        workdirs.tell_other_runs(run.config)
    workdirs.open_workdir(run.config, str(workdir), allow_changes=run.allow_changes)
    file = workdir / "slurm.sbatch"
    (workdir / "logs").mkdir(exist_ok=True)
    file.write_text(script)
    try:
        return _run("sbatch", "--parsable", str(file)).strip().split(";")[0]
    except protocols.LibraError:
        if not existed:
            shutil.rmtree(workdir, ignore_errors=True)
        raise


def _settings(run: job_flags.Run) -> slurm_job.Settings:
    named = {
        "--account": _ACCOUNT.value,
        "--qos": _QOS.value,
        "--constraint": _CONSTRAINT.value,
        "--exclude": _EXCLUDE.value,
    }
    environment, key = list(_ENVIRONMENT.value), job_flags.telemetry_key(run.config)
    if key and not any(line.partition("=")[0] in (key, "WANDB_MODE") for line in environment):
        if key in os.environ:
            environment.append(key)  # by its name: the value never enters the script
        elif not (Path.home() / ".netrc").exists():
            print(
                f"note: config.telemetry.wandb_project needs {key} on the hosts, and it is not set here; set it, or "
                "give --environment=WANDB_MODE=offline",
                file=sys.stderr,
            )
    return slurm_job.Settings(
        partition=_PARTITION.value,
        train_partition=_TRAIN.value,
        rollout_partition=_ROLLOUT.value,
        time=_TIME.value,
        options=(*(f"{name}={shlex.quote(value)}" for name, value in named.items() if value), *_SBATCH.value),
        nodelist=_NODELIST.value,
        cpus_per_host=_CPUS.value,
        memory=_MEMORY.value,
        exclusive=_EXCLUSIVE.value,
        requeue=_REQUEUE.value,
        grace=_GRACE.value,
        retries=_RETRIES.value,
        environment=tuple(environment),
        image=_IMAGE.value,
        container_mounts=_MOUNTS.value,
        setup=_SETUP.value,
        python=_PYTHON.value or ("python3" if _IMAGE.value else sys.executable),
    )


def _run(*command: str) -> str:
    """Runs a command of Slurm's and returns its output.

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
    cli.run(main, interrupted="interrupted; what was submitted stays so.", needs_config=True)
