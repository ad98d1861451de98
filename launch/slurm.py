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

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support import cli, job_flags, slurm_job

from absl import flags

from libra_jax import protocols
from libra_jax.build import workdirs

COMMAND_SECONDS = 30.0

for _field in dataclasses.fields(slurm_job.Settings):
    if "help" in _field.metadata:  # the other launchers have the rest, too
        _define = {str: flags.DEFINE_string, bool: flags.DEFINE_bool}.get(
            type(_field.default), flags.DEFINE_multi_string
        )
        _define(_field.name, _field.default, _field.metadata["help"])
job_flags.cpus_per_host("6 for each accelerator and 1 more; 1 for each part of a CPU")
job_flags.grace()
job_flags.retries("; pre-emptions and the end of its time do not count")
job_flags.environment(", or the NAME of a variable that is taken from yours (a secret)")
job_flags.image()
job_flags.setup()
flags.adopt_module_key_flags(job_flags)  # so that --help shows them


def main() -> None:
    run = job_flags.run()
    workdir = Path.cwd() / (job_flags.WORKDIR.value or workdirs.default(run.config))
    workdirs.check_place(workdir)
    partitions = None
    # Only if Slurm can be asked: a dry run may be on any machine, and sbatch decides in any case.
    if shutil.which("sinfo"):
        try:
            partitions = slurm_job.read_partitions(_run("sinfo", "--noheader", "--format=%P|%D|%G|%c|%m"))
        except protocols.LibraError as error:
            print(f"Partitions were not checked: {error}", file=sys.stderr)
    script = slurm_job.script(
        run.resolved,
        _settings(run),
        arguments=run.arguments,
        folder=Path.cwd(),
        workdir=workdir,
        known=os.environ,
        size=run.host_size(),
        partitions=partitions,
    )
    run.validate()
    if job_flags.DRY_RUN.value:
        print(script, end="")
        return
    if not shutil.which("sbatch"):
        raise protocols.ConfigError(
            "sbatch is not on PATH: this machine cannot submit to Slurm. Go to a login node of the cluster, or give "
            "--dry_run to see the script"
        )
    number = _submit(run, workdir, script)
    print(f"{run.config.name} is submitted. Logs: {workdir / 'logs' / 'latest'}", file=sys.stderr)
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
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(slurm_job.Settings)}
    key = job_flags.telemetry_key(run.config)
    if key and not any(line.partition("=")[0] in (key, "WANDB_MODE") for line in values["environment"]):
        if key in os.environ:
            values["environment"] = [*values["environment"], key]  # by its name: the value never enters the script
        elif not (Path.home() / ".netrc").exists():
            print(
                f"note: config.telemetry.wandb_project needs {key} on the hosts, and it is not set here; set it, or "
                "give --environment=WANDB_MODE=offline",
                file=sys.stderr,
            )
    values["python"] = values["python"] or ("python3" if values["image"] else sys.executable)
    return slurm_job.Settings(**values)


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
