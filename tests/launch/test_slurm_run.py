"""A run under a real Slurm of one node: submitted and requeued; as a drill also two at once, of which one is told to
stop; what it accepts and refuses."""

import collections
import os
import pathlib
import re
import subprocess
import sys

import compiling
import psutil
import pytest
import real_runs
import scripts
import slurm_node

from tests.drills import network_hosts

lacking = slurm_node.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(lacking),
        reason=f"a Slurm of one node lacks {', '.join(lacking)}: as root, apt-get install slurmctld slurmd munge",
    ),
]

STEPS, GROUPS, ATTEMPTS = 24, 4, 2
RUN_SECONDS = 400.0
SETTINGS = (
    *real_runs.small(STEPS, GROUPS, ATTEMPTS),
    "--config.trainer.row_tokens=128",
    "--config.checkpoint.every=1",
    "--config.deadlines.cluster_start=300",
    "--environment=PYTHONPATH",
    "--environment=JAX_PLATFORMS",
    "--time=30",
)


@pytest.fixture(scope="module")
def slurm():
    with slurm_node.running() as running:
        yield running


def compiling_fast() -> list[str]:
    return [f"--environment={name}={value}" for name, value in compiling.variables().items()]


def launch(slurm: slurm_node.Slurm, *arguments: str) -> subprocess.CompletedProcess[str]:
    """launch/slurm.py, from where this Slurm can be reached."""
    paths = os.pathsep.join(filter(None, [str(scripts.ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "launch/slurm.py", *arguments],
        cwd=scripts.ROOT,
        env={**slurm.environment, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def submit(slurm: slurm_node.Slurm, *arguments: str) -> str:
    """The job's number."""
    done = launch(slurm, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def steps_done(workdir: pathlib.Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def what_happened(workdir: pathlib.Path) -> str:
    """All logs, for a failure's message."""
    files = sorted((workdir / "logs").glob("slurm-*.out")) + sorted((workdir / "logs").glob("attempt_*/*.log"))
    return "\n".join(f"== {file}\n{file.read_text()[-2000:]}" for file in files)


def assert_trained_once(workdir: pathlib.Path) -> None:
    """Every step, on a new set of prompts, each of them once."""
    steps = [line["step"] for line in real_runs.lines(workdir / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    prompts = collections.Counter(line["prompt_id"] for line in real_runs.lines(workdir / "trace.jsonl"))
    assert set(prompts.values()) == {ATTEMPTS}
    assert {prompt.rsplit("-", 1)[-1] for prompt in prompts} == {str(index) for index in range(STEPS * GROUPS)}


def of_ray(job: str) -> list[str]:
    """Processes of the Ray of a job."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if f"/tmp/libra-{job}-" in line:
            found.append(line)
    return found


@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "signalled", [False, pytest.param(True, marks=pytest.mark.drill)], ids=["alone", "beside one that gets a signal"]
)
def test_a_run_goes_on_after_a_requeue(slurm, tmp_path, signalled):
    told, requeued = tmp_path / "told", tmp_path / "re queued"
    settings = [*SETTINGS, *compiling_fast()]
    workdirs = (told, requeued) if signalled else (requeued,)
    jobs = {workdir: submit(slurm, *settings, f"--workdir={workdir}") for workdir in workdirs}

    def begun(workdir: pathlib.Path) -> bool:
        assert slurm.jobs().count(jobs[workdir]), what_happened(workdir)
        return steps_done(workdir) >= 2

    if signalled:
        slurm_node.wait_for(lambda: begun(told), RUN_SECONDS, "second step of the run that is told to stop")
        slurm.run("scancel", "--batch", "--signal=TERM", jobs[told])  # as Slurm does before it ends a job
    slurm_node.wait_for(lambda: begun(requeued), RUN_SECONDS, "second step of the run that is requeued")
    (folder,) = pathlib.Path("/tmp").glob(f"libra-{jobs[requeued]}-*")
    assert folder.stat().st_mode & 0o777 == 0o700, "other users reach Ray's folder, which Ray opens to all"
    assert list(folder.glob("*/session_2*")), "Ray runs elsewhere"
    slurm.run("scontrol", "requeue", jobs[requeued])
    reached = {workdir: steps_done(workdir) for workdir in jobs}

    for workdir, job in jobs.items():
        slurm_node.wait_for(lambda job=job: job not in slurm.jobs(), RUN_SECONDS, f"end of job {job}")
        said = what_happened(workdir)
        assert slurm.field(job, "JobState") == "COMPLETED", said
        assert slurm.field(job, "Restarts") == "1", said
        assert reached[workdir] < STEPS, "the run was over too soon"
        assert_trained_once(workdir)
        logs = workdir / "logs"
        assert sorted(path.name for path in logs.glob("attempt_*")) == ["attempt_1", "attempt_2"]
        assert os.readlink(logs / "latest") == "attempt_2"
        assert (logs / "latest" / "ended").read_text() == "finished\n"
        assert not list(logs.glob("attempt_*/token"))
        assert not of_ray(job)
        assert not list(pathlib.Path("/tmp").glob(f"libra-{job}-*"))

    if signalled:
        assert (told / "logs" / "attempt_1" / "ended").read_text() == "stopped\n"
        assert "SIGTERM: stopping, with a checkpoint" in (told / "logs" / "attempt_1" / "train.log").read_text()


def test_a_run_over_two_partitions_is_taken_with_the_hosts_of_its_layout(slurm, tmp_path):
    job = submit(
        slurm,
        "--config=configs/qwen3_1p7b_8gpu.py",
        "--config.cluster.accelerators_per_host=2",
        "--config.trainer.processes=2",
        "--config.rollout.tensor_parallel=(2,2,2)",
        "--train_partition=train",
        "--rollout_partition=rollout",
        "--exclusive",
        "--time=1-00:00:00",
        "--sbatch=--comment=mine",
        f"--workdir={tmp_path / 'run'}",
    )
    shown = slurm.run("scontrol", "show", "job", job, "--oneliner").splitlines()
    found = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in shown]
    wanted = ("Partition", "NumNodes", "TresPerNode", "TimeLimit", "OverSubscribe", "JobState")
    assert [tuple(part[name].replace("gres:", "") for name in wanted) for part in found] == [
        ("train", "2-2", "gpu:2", "1-00:00:00", "NO", "PENDING"),
        ("rollout", "3-3", "gpu:2", "1-00:00:00", "NO", "PENDING"),
    ]
    slurm.run("scancel", job)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--partition=mian",), "--partition: Slurm has no partition 'mian'; did you mean main?"),
        (
            ("--partition=train", "--config.rollout.tensor_parallel=(8,8,8,8)"),
            "--partition: the run takes 5 hosts (1 host to train, 4 hosts to roll out), and partition 'train' has 4 "
            "with 8 GPUs; ",
        ),
        (
            ("--partition=main",),
            "config.cluster.accelerators_per_host: a host is asked for 4 GPUs, and those of partition 'main' have at "
            "most 0; ",
        ),
        (("--partition=train", "--constraint=nvlink"), "sbatch refused: Batch job submission failed: "),
    ],
)
def test_what_slurm_cannot_give_is_refused_in_a_sentence(slurm, tmp_path, flags, problem):
    config = "--config=configs/qwen3_1p7b_8gpu.py", "--config.cluster.accelerators_per_host=8"
    scripts.assert_one_sentence(launch(slurm, *config, f"--workdir={tmp_path / 'run'}", *flags), f"error: {problem}")
    assert not slurm.jobs()
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.drill
@pytest.mark.timeout(600)
def test_a_run_goes_over_the_hosts_of_two_partitions(tmp_path):
    """Two emulated hosts; the driver is on the one that trains."""
    if lacking := network_hosts.missing():
        pytest.skip(f"emulated hosts lack {', '.join(lacking)}")
    workdir = tmp_path / "run"
    with slurm_node.running(hosts=2) as two:
        job = submit(
            two,
            *SETTINGS,
            "--config.cluster.accelerators_per_host=1",
            "--train_partition=train",
            "--rollout_partition=rollout",
            *compiling_fast(),
            f"--workdir={workdir}",
        )
        slurm_node.wait_for(lambda: not two.jobs(), RUN_SECONDS, f"end of job {job}")
        said = what_happened(workdir)
        states = re.findall("JobState=([A-Z]+)", two.run("scontrol", "show", "job", job))
        assert states == ["COMPLETED", "COMPLETED"], said
    assert_trained_once(workdir)
    logs = workdir / "logs" / "latest"
    assert "host2: all 2 hosts have joined; the driver starts." in (logs / "host-host2.log").read_text()
    assert "Ray runtime started" in (logs / "host-host1.log").read_text()
    assert "Ray placed the run on 2 hosts: host2 to train" in (logs / "train.log").read_text()
    assert not of_ray(job)
    assert not list(pathlib.Path("/tmp").glob(f"libra-{job}-*"))
