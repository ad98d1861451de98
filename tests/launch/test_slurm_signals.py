"""What becomes of a job that a real Slurm signals, cancels or requeues, or that loses a host.

Script, steps and signals are real; Ray's start and the driver are doubles, which take no time and save for two seconds.
"""

import os
import pathlib
import sys

from support import slurm_job

import pytest
import scripts
import slurm_node

from configs import quickstart
from libra_jax import config as config_lib
from libra_jax.cluster import resolved_run

lacking = slurm_node.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(lacking), reason=f"a Slurm of one node lacks {', '.join(lacking)}"),
]

SECONDS = 90.0

RAY = """#!/bin/bash
exit 0
"""

DRIVER = """
import os, pathlib, signal, sys, time
workdir = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
attempt = len(list((workdir / "logs").glob("attempt_*")))
what = (workdir / "plan").read_text().split()[attempt - 1]
(workdir / f"up_{attempt}").touch()
if what == "lose":
    sys.exit(os.EX_TEMPFAIL)
if what == "cut":
    os.kill(os.getppid(), signal.SIGKILL)  # who would write down how it ended
    time.sleep(60)
while what == "wait" and not told:
    time.sleep(0.05)
if told:
    time.sleep(2.0)
    with open(workdir / "saved", "a") as saved:
        saved.write(f"{len(told)} ")
    sys.exit(os.EX_TEMPFAIL)
"""


@pytest.fixture(scope="module")
def slurm():
    with slurm_node.running() as running:
        yield running


def submit(slurm: slurm_node.Slurm, folder: pathlib.Path, plan: str, **settings: int) -> tuple[str, pathlib.Path]:
    """A job whose driver does what the plan says, a word an attempt: its number, and its workdir."""
    programs, launch, workdir = folder / "bin", folder / "launch", folder / "run"
    for made in (programs, launch, workdir / "logs"):
        made.mkdir(parents=True)
    (workdir / "plan").write_text(plan)
    (launch / "train.py").write_text(DRIVER)
    (launch / "slurm_host.py").symlink_to(scripts.ROOT / "launch" / "slurm_host.py")
    for name, text in (("ray", RAY), ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    config = quickstart.get_config()
    config.cluster.backend, config.cluster.address = "ray", "auto"
    script = folder / "job.sbatch"
    text = slurm_job.script(
        resolved_run.resolve(config_lib.checked(config), need_weights=False),
        slurm_job.Settings(
            time="10",
            environment=(f"PYTHONPATH={scripts.ROOT}:{os.environ.get('PYTHONPATH', '')}",),
            python=str(programs / "python"),
            **settings,
        ),
        arguments=[],
        folder=folder,
        workdir=workdir,
        known=os.environ,
        launch=launch,
    )
    script.write_text(text)
    return slurm.run("sbatch", "--parsable", str(script)).strip(), workdir


@pytest.fixture(scope="module")
def jobs(slurm, tmp_path_factory) -> dict[str, tuple[str, pathlib.Path]]:
    """The jobs of all tests by their plan: they run side by side, because each waits for Slurm most of its time."""
    plans = {"lose lose lose": {"retries": 1}, "cut finish": {"retries": 1}}
    told = ["its script"]
    if slurm_node.tracks_by_cgroups():  # otherwise, Slurm signals all that a step has started
        told += ["its steps", "by a requeue", "cancelled"]
    folder = tmp_path_factory.mktemp("jobs")
    made = {plan: submit(slurm, folder / plan, plan, **settings) for plan, settings in plans.items()}
    return made | {how: submit(slurm, folder / how, "wait finish") for how in told}


def happened(workdir: pathlib.Path) -> str:
    files = [*(workdir / "logs").glob("*.out"), *(workdir / "logs").glob("attempt_*/*.log")]
    return "\n".join(f"== {file}\n{file.read_text()[-2000:]}" for file in sorted(files))


def ends(workdir: pathlib.Path) -> list[str]:
    """How each attempt ended."""
    return [file.read_text().strip() for file in sorted((workdir / "logs").glob("attempt_*/ended"))]


def wait_for_the_driver(workdir: pathlib.Path) -> None:
    slurm_node.wait_for((workdir / "up_1").exists, SECONDS, f"driver: {happened(workdir)}")


def wait_for_the_end(slurm: slurm_node.Slurm, job: str, workdir: pathlib.Path) -> None:
    slurm_node.wait_for(lambda: job not in slurm.jobs(), SECONDS, f"end of the job: {happened(workdir)}")


TOLD = {
    "its script": ("scancel", "--batch", "--signal=TERM"),
    "its steps": ("scancel", "--signal=TERM"),
    "by a requeue": ("scontrol", "requeue"),
}


def test_a_job_that_is_told_to_end_saves_and_goes_on_at_its_next_turn(slurm, jobs):
    told = {how: jobs[how] for how in TOLD if how in jobs}
    for how, (job, workdir) in told.items():
        wait_for_the_driver(workdir)
        slurm.run(*TOLD[how], job)
    for how, (job, workdir) in told.items():
        wait_for_the_end(slurm, job, workdir)
        said = f"{how}: {happened(workdir)}"
        assert (workdir / "saved").read_text() == "1 ", said
        assert ends(workdir) == ["stopped", "finished"], said
        assert (slurm.field(job, "JobState"), slurm.field(job, "Restarts")) == ("COMPLETED", "1"), said


def test_a_job_that_is_cancelled_saves_as_long_as_slurm_lets_it_and_stays_cancelled(slurm, jobs):
    if "cancelled" not in jobs:
        pytest.skip("without cgroups, Slurm signals all that a step has started")
    job, workdir = jobs["cancelled"]
    wait_for_the_driver(workdir)
    slurm.run("scancel", job)
    wait_for_the_end(slurm, job, workdir)
    said = happened(workdir)
    assert (workdir / "saved").read_text() == "1 ", said
    assert ends(workdir) == ["stopped"], said
    assert slurm.field(job, "JobState") == "CANCELLED", said


def test_a_job_that_loses_what_it_needs_goes_on_so_many_times(slurm, jobs):
    job, workdir = jobs["lose lose lose"]
    wait_for_the_end(slurm, job, workdir)
    said = happened(workdir)
    assert ends(workdir) == ["lost", "lost"], said
    assert (slurm.field(job, "JobState"), slurm.field(job, "ExitCode")) == ("FAILED", "75:0"), said
    assert "it has lost what it needs 2 times, and is not started again (--retries=1)" in said


def test_a_job_whose_driver_is_cut_off_goes_on(slurm, jobs):
    job, workdir = jobs["cut finish"]
    wait_for_the_end(slurm, job, workdir)
    said = happened(workdir)
    assert "attempt 1 was cut off" in said
    assert ends(workdir) == ["lost", "finished"], said
    assert (slurm.field(job, "JobState"), slurm.field(job, "Restarts")) == ("COMPLETED", "1"), said
