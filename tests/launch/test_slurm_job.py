"""A run as a Slurm job: its script against golden files, what of it changes with a setting, and what is refused."""

import dataclasses
import difflib
import os
import pathlib
import shutil
import subprocess

from support import host_sizes, slurm_job

import pytest

from configs import quickstart, qwen3_1p7b_8gpu
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config


def resolved(run):
    return resolved_run.resolve(run, need_weights=False)


GOLDEN = pathlib.Path(__file__).parent / "golden"
PLAIN = slurm_job.Settings()
TWO_PARTITIONS = slurm_job.Settings(
    train_partition="h100",
    rollout_partition="l40s",
    time="1-00:00:00",
    account="lab",
    exclusive=True,
    environment=("NCCL_SOCKET_IFNAME=ib0", "WANDB_API_KEY"),
    image="/shared/images/libra jax.sqsh",
    container_mounts="/shared:/shared",
    setup="module load cuda",
)


def parse(module, **changed) -> config_lib.RunConfig:
    """A run of one of the configs, under the job's Ray."""
    values = config_lib.to_dict(module.get_config())
    values["cluster"].update(backend="ray", address="auto", accelerators_per_host=changed.pop("per_host", 0))
    for name, value in changed.items():
        room, _, field = name.partition("__")
        values[room][field] = value
    return config_lib.parse(config_lib.RunConfig, values)


def script(config: config_lib.RunConfig, settings: slurm_job.Settings = PLAIN) -> str:
    """The job's script, as it is on no machine in particular."""
    return slurm_job.script(
        resolved(config),
        dataclasses.replace(settings, python="python3"),
        arguments=[f"--config=configs/{config.name}.py", "--config.cluster.address=auto"],
        folder=pathlib.Path("/shared/project"),
        workdir=pathlib.Path("/shared/project/runs/mine"),
        known={"WANDB_API_KEY": "do-not-tell"},
        launch=pathlib.Path("/shared/libra-jax/launch"),
    )


def over_hosts(**changed) -> config_lib.RunConfig:
    return parse(qwen3_1p7b_8gpu, **{"per_host": 2, "trainer__processes": 2, **changed})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("slurm_one_host.sbatch", lambda: script(parse(quickstart), slurm_job.Settings(time="60"))),
        ("slurm_two_partitions.sbatch", lambda: script(over_hosts(), TWO_PARTITIONS)),
    ],
)
def test_the_script_is_the_golden_one(name, make):
    text, golden = make(), GOLDEN / name
    if os.environ.get("LIBRA_UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    changed = difflib.unified_diff(golden.read_text().splitlines(), text.splitlines(), "golden", "now", lineterm="")
    assert text == golden.read_text(), "\n".join(changed) + (
        "\nIf that is meant, run this test once with LIBRA_UPDATE_GOLDEN=1 in the environment, and commit "
        f"{name} with the reason."
    )


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*.sbatch")))
def test_a_shell_finds_nothing_wrong_with_the_script(name):
    checker = ["shellcheck"] if shutil.which("shellcheck") else ["bash", "-n"]
    done = subprocess.run([*checker, str(GOLDEN / name)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


ENDS = """
set -euo pipefail
workdir={workdir} attempt={workdir}/logs/attempt_3 number=3 SLURM_JOB_ID={job}
scontrol() {{ echo "scontrol $*" >&2; if [ "$1" = show ]; then echo JobState=RUNNING; fi; }}
"""


def write(attempt: pathlib.Path, *, job: int, ended: str) -> None:
    """What an attempt leaves: its job, and how it ended, if it could say so."""
    attempt.mkdir(parents=True)
    (attempt / "job").write_text(f"{job}\n")
    if ended:
        (attempt / "ended").write_text(f"{ended}\n")


def end(workdir: pathlib.Path, job: int, **settings) -> subprocess.CompletedProcess[str]:
    """What the job's script does when its third attempt has ended, with a double of scontrol."""
    text = script(parse(quickstart), slurm_job.Settings(**settings))
    ending = ENDS.format(workdir=workdir, job=job) + text[text.index("ended=$(cat") :]
    return subprocess.run(["bash", "-c", ending], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("before", "ended", "requeue", "retries", "status", "again"),
    [
        ((), "finished", True, 1, 0, False),
        ((), "failed 3", True, 1, 3, False),
        (("stopped", "stopped"), "stopped", True, 1, 0, True),
        (("stopped", "stopped"), "lost", True, 1, 0, True),
        (("lost", "stopped"), "lost", True, 1, 75, False),
        (("lost", "lost"), "stopped", True, 1, 0, True),
        ((), "stopped", False, 1, 0, False),
        ((), "lost", False, 1, 75, False),
    ],
)
def test_a_job_that_lost_a_host_queues_up_again_so_many_times_and_one_that_was_told_to_stop_always(
    tmp_path, before, ended, requeue, retries, status, again
):
    for number, how in enumerate((*before, *([""] * (2 - len(before))), ended), start=1):
        folder = tmp_path / "logs" / f"attempt_{number}"
        write(folder, job=7, ended=how)
    done = end(tmp_path, 7, requeue=requeue, retries=retries)
    assert (done.returncode, "scontrol requeue 7" in done.stderr) == (status, again), done.stdout + done.stderr


def test_what_another_job_of_the_workdir_lost_does_not_count(tmp_path):
    for number, job in enumerate((7, 17, 8), start=1):
        write(tmp_path / "logs" / f"attempt_{number}", job=job, ended="lost")
    done = end(tmp_path, 8, retries=1)
    assert (done.returncode, "scontrol requeue 8" in done.stderr) == (0, True), done.stdout + done.stderr
    done = end(tmp_path, 8, retries=0)
    assert (done.returncode, "scontrol requeue 8" in done.stderr) == (75, False), done.stdout + done.stderr
    assert "lost what it needs 1 times" in done.stdout


@pytest.mark.parametrize(("begun", "status", "again"), [(True, 0, True), (False, 1, False)])
def test_a_driver_that_is_cut_off_is_lost_and_where_there_was_none_nothing_is_started_again(
    tmp_path, begun, status, again
):
    attempt = tmp_path / "logs" / "attempt_3"
    write(attempt, job=7, ended="")
    if begun:
        (attempt / "train.log").touch()
    done = end(tmp_path, 7, retries=1)
    assert "attempt 3 was cut off" in done.stdout
    assert (done.returncode, "scontrol requeue 7" in done.stderr) == (status, again), done.stdout + done.stderr
    if begun:
        assert end(tmp_path, 7, retries=0).returncode == 75, "it counts"


def test_another_instance_changes_only_the_lines_that_count_hosts():
    before = script(over_hosts(), TWO_PARTITIONS).splitlines()
    after = script(over_hosts(rollout__tensor_parallel=(2, 2, 2)), TWO_PARTITIONS).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("# qwen3-1.7b: 2 hosts to train; 2 hosts to roll out", "# qwen3-1.7b: 2 hosts to train; 3 hosts to roll out"),
        ("# 2 hosts to roll out", "# 3 hosts to roll out"),
        ("#SBATCH --nodes=2", "#SBATCH --nodes=3"),
        *[(line, line.replace("--hosts=4", "--hosts=5")) for line in before if "--hosts=4" in line],
    ]


def test_a_secret_comes_by_its_name_and_a_value_reaches_the_run_as_it_is():
    value = """it's "$HOME" `date` \\ *"""
    text = script(parse(quickstart), slurm_job.Settings(environment=(f"NOTE={value}", "WANDB_API_KEY")))
    assert "do-not-tell" not in text
    export = next(line for line in text.splitlines() if line.startswith("#SBATCH --export="))
    assert "WANDB_API_KEY" in export.split(",")
    line = next(line for line in text.splitlines() if line.startswith("export NOTE="))
    shown = subprocess.run(["bash", "-c", f'{line}; printf %s "$NOTE"'], capture_output=True, text=True, check=True)
    assert shown.stdout == value


NODES = "gpu*|4|gpu:8|64|500000+\nsmall|2|gpu:4|16|90000\nsmall|4|gpu:2|8+|30000\nbare|2|(null)|4|1\n"


@pytest.mark.parametrize(
    ("settings", "there", "options"),
    [
        ({}, False, ["--cpus-per-task=13", "--mem=40960M"]),
        ({}, True, ["--cpus-per-task=13", "--mem=40960M"]),
        ({"partition": "small"}, True, ["--cpus-per-task=8", "--mem=30000M"]),
        ({"partition": "bare"}, True, ["--cpus-per-task=4"]),  # no one has configured its memory
        ({"cpus_per_host": 20, "memory": "9G"}, True, ["--cpus-per-task=20", "--mem=9G"]),
        ({"exclusive": True}, True, ["--mem=0"]),
        ({"sbatch": ("--mem-per-cpu=2G", "-c 3")}, True, []),
    ],
)
def test_a_host_is_asked_for_what_the_run_needs_and_the_partition_has(settings, there, options):
    given, known = slurm_job.Settings(**settings), slurm_job.read_partitions(NODES) if there else None
    (group,) = slurm_job.host_groups(resolved(parse(qwen3_1p7b_8gpu, per_host=8)), given)
    amounts = slurm_job.amounts(given, host_sizes.HostSize(13, 40 * 1024), known, group.partition)
    asked = [option for option in group.options(given, amounts) if option.startswith(("--cpus-per-task", "--mem="))]
    assert asked == options


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"per_host": 0}, ()),
        ({"per_host": 0, "rollout__tensor_parallel": (1,) * 12}, ("is 0, so one host is asked for all 16 accel",)),
        ({"per_host": 4, "trainer__processes": 1}, ()),
        (
            {"per_host": 8, "trainer__processes": 1, "trainer__fsdp": 1, "rollout__tensor_parallel": (1,)},
            ("takes 1 of 8 on host 0, 1 of 8 on host 1, so 14 stay idle",),
        ),
    ],
)
def test_hosts_with_idle_or_too_many_accelerators_are_warned_of(changed, fragments):
    said = host_sizes.unlikely(resolved(parse(qwen3_1p7b_8gpu, **changed)))
    assert all(fragment in said for fragment in fragments)
    assert bool(said) == bool(fragments)


def test_memory_of_a_host_grows_with_the_model_and_its_share_of_the_state():
    run = over_hosts(model__path="", model__preset="Qwen3-8B")
    shape = model_config.load_preset("Qwen3-8B")
    larger, smaller = (
        host_sizes.estimate(resolved_run.ResolvedRun(one, shape))
        for one in (over_hosts(per_host=4, trainer__processes=1), run)
    )
    weights, state = 2 * 8.19e9 / 2**30, 12 * 8.19e9 / 2**30  # bfloat16; float32 with two moments
    assert smaller.memory_mib > 1024 * (2 * weights + state / 2)
    assert larger.memory_mib > 1024 * (2 * weights + state)
    assert host_sizes.estimate(resolved_run.ResolvedRun(run, None)).memory_mib == 0, "not known"
    assert (smaller.cpus, larger.cpus) == (13, 25)


@pytest.mark.parametrize(
    ("changed", "settings", "parts"),
    [
        ({"per_host": 0}, {}, [("", 1, 8)]),
        ({"per_host": 8}, {"partition": "gpu"}, [("gpu", 2, 4)]),
        ({"per_host": 8}, {"train_partition": "a", "rollout_partition": "b"}, [("a", 1, 4), ("b", 1, 4)]),
        (
            {"per_host": 8, "rollout__tensor_parallel": (8, 4, 4, 2)},
            {"train_partition": "a", "rollout_partition": "b"},
            [("a", 1, 4), ("b", 3, 8)],
        ),
        ({"per_host": 2, "trainer__processes": 2, "trainer__platform": "cpu"}, {}, [("", 4, 0)]),
    ],
)
def test_hosts_are_those_of_the_layout(changed, settings, parts):
    config = parse(qwen3_1p7b_8gpu, **changed)
    groups = slurm_job.host_groups(resolved(config), slurm_job.Settings(**settings))
    assert [(group.partition, group.hosts, group.gpus) for group in groups] == parts


@pytest.mark.parametrize(
    ("text", "seconds"),
    [  # the forms of sbatch's manual, in its order
        ("90", 5_400),
        ("1:30", 90),
        ("2:00:05", 7_205),
        ("1-3", 97_200),
        ("1-2:30", 95_400),
        ("2-00:00:01", 172_801),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert slurm_job.seconds(text) == seconds


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"time": "1h"}, "--time=1h: is no time of Slurm's; write minutes, "),
        ({"time": "2"}, "--grace=120: .* --time=2 is not longer; lower it"),
        ({"train_partition": "a"}, "--train_partition and --rollout_partition go together"),
        ({"train_partition": "a", "rollout_partition": "b", "partition": "c"}, "--partition=c: does not go with "),
        ({"train_partition": "a", "rollout_partition": "b", "nodelist": "n1"}, "--nodelist=n1: does not go with "),
        ({"train_partition": "a", "rollout_partition": "b"}, r"config\.cluster\.accelerators_per_host: is 0, "),
        ({"container_mounts": "/a:/b"}, "--container_mounts: .* give --image, too"),
        ({"environment": ("A B=1",)}, "--environment=A B: is no name of a variable; write NAME=VALUE"),
        ({"environment": ("NOT_SET",)}, "--environment=NOT_SET: is not set where you submit from"),
        ({"environment": ("HF_TOKEN=hf_1234",)}, "--environment: the value of HF_TOKEN looks like a secret, .* alone"),
        ({"grace": 30}, r"--grace=30: .* up to 60 s \(config\.deadlines\.grace\)"),
    ],
)
def test_a_wrong_setting_is_refused_by_the_name_of_its_flag(settings, problem):
    with pytest.raises(protocols.ConfigError, match=problem) as refused:
        script(parse(quickstart), slurm_job.Settings(**settings))
    assert "hf_1234" not in str(refused.value)


def test_a_run_that_saves_nothing_is_not_requeued():
    config = parse(quickstart, checkpoint__every=0)
    with pytest.raises(protocols.ConfigError, match=r"config\.checkpoint\.every: is 0, .*--norequeue"):
        script(config)
    assert "#SBATCH --no-requeue" in script(config, slurm_job.Settings(requeue=False))


def test_a_tpu_is_no_host_of_slurms():
    with pytest.raises(protocols.ConfigError, match=r"config\.trainer\.platform: tpu is for launch/tpu\.py"):
        script(parse(quickstart, trainer__platform="tpu"))


def test_partitions_are_read_with_the_gpus_of_their_nodes():
    shown = (
        "main*|3|(null)|4|1\nh100|4|gpu:h100:8(S:0-1)|64|9\nh100|2|gpu:h100:4,nvme:1|64|9\nmixed|1|gpu:a:2,gpu:b:6|8|9"
    )
    nodes = {name: partition.nodes for name, partition in slurm_job.read_partitions(shown).items()}
    assert nodes == {"": ((3, 0),), "main": ((3, 0),), "h100": ((4, 8), (2, 4)), "mixed": ((1, 8),)}
