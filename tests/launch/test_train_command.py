"""`launch/train.py` as a user meets it: dry runs, and one sentence for each kind of bad input."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import scripts

from libra_jax import config as config_lib
from libra_jax.build import workdirs

QUICKSTART = "--config=configs/quickstart.py"
REAL_SIZE = "--config=configs/qwen3_1p7b_8gpu.py"

train = functools.partial(scripts.run_forked, "train.py")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("model")
    preset = json.loads((scripts.ROOT / "libra_jax/models/presets/libra-tiny.json").read_text())
    (directory / "config.json").write_text(json.dumps(preset))
    return directory


def test_dry_run_prints_the_config_the_mesh_and_the_partition():
    result = train(QUICKSTART, "--dry_run", "--config.rollout.tensor_parallel=(1,2)", "--config.trainer.fsdp=2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("settings    ")
    assert "\n  --config.trainer.fsdp=2\n" in result.stdout
    assert "config.optimizer.clip_norm" not in result.stdout  # as the default
    assert "tasks       libra_jax.examples.calculator:task_source, generated; the first: " in result.stdout
    assert "mesh        data=1 fsdp=2 tensor=1 context=1" in result.stdout
    assert "trainer   devices 0-1" in result.stdout
    assert "rollout-0 device 2: tensor parallel 1" in result.stdout
    assert "rollout-1 devices 3-4: tensor parallel 2" in result.stdout


def test_dry_run_validates_the_real_size_config_without_its_weights():
    result = train(REAL_SIZE, "--dry_run")
    shape = "qwen3, 1,720.57 M parameters (no model at models/Qwen3-1.7B: this is model.preset=Qwen3-1.7B)"
    assert shape in result.stdout
    assert "tasks       libra_jax.environments.datasets:task_source (data/questions.jsonl is not here)" in result.stdout
    assert "mesh        data=1 fsdp=4 tensor=1 context=1" in result.stdout
    assert "partition   8 devices" in result.stdout
    for line in (
        "algorithm   grpo advantages, clipped loss (ratio in [0.8, 1.28])",
        "KL          off",
        "optimizer   adamw, learning rate 1e-06",
        "memory      fits a100 (74.5 GiB), h100",
    ):
        assert line in result.stdout
    missing = (
        "config.model.path: models/Qwen3-1.7B is no folder here",
        "config.task.path: data/questions.jsonl: no such",
    )
    scripts.assert_one_sentence(result, "this run cannot start here", *missing)


MIRROR = """
from libra_jax import protocols


class Mirror:
    async def reset(self, task):
        self.answer = task.payload["answer"]
        return [protocols.Message("user", task.payload["prompt"])]

    async def step(self, output):
        return protocols.StepResult(done=True, reward=float(output == self.answer))

    async def close(self): ...


def make():
    return Mirror()
"""
"""An environment of a user's own."""


def test_dry_run_shows_columns_that_nothing_reads_and_what_an_environment_gave(tmp_path):
    (tmp_path / "mirror.py").write_text(MIRROR)
    rows = [{"prompt": f"{n}?", "answer": str(n), "level": 3, "meta": {"gold": n}, "other": 1} for n in range(9)]
    rows += [{"prompt": "1?", "answer": "2"}, {"prompt": "none?", "answer": None}]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"meta": {"gold": 5}, **row}) + "\n" for row in rows))
    arguments = {"holdout": 0, "missing_answers": "skip", "columns": {"gold": "meta.gold"}}
    result = scripts.run_forked(
        "train.py",
        "--config=configs/questions.py",
        f"--config.task.path={tasks}",
        f"--config.task.arguments={arguments}",
        "--config.task.environment=mirror:make",
        "--config.task.environment_arguments={}",
        "--dry_run",
        environment={"PYTHONPATH": f"{tmp_path}:{scripts.ROOT}"},
    )
    assert result.returncode == 0, result.stderr
    assert ", 10 to train on; the first: " in result.stdout
    assert "  unread    'level', 'other': no task has these columns\n" in result.stdout
    assert "  environment gave 1 for the first task with its own answer\n" in result.stdout
    assert result.stderr.count("1 of 11 rows have no answer") == 1


def test_dry_run_counts_the_tasks_and_shows_the_first_prompt(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    question = "How long is a piece of string " + "that is cut in half and " * 5
    tasks.write_text("".join(json.dumps({"prompt": f"{question}{n}?", "answer": "2"}) + "\n" for n in range(40)))
    result = train("--config=configs/questions.py", f"--config.task.path={tasks}", "--dry_run")
    assert result.returncode == 0, result.stderr
    shown = next(line for line in result.stdout.splitlines() if line.startswith("tasks "))
    assert f"{tasks}, 38 to train on, 2 held out; the first: How long is a piece of string" in shown
    assert shown.endswith(" ...")
    prompt = result.stdout.partition("the first, as the policy sees it (")[2].partition("reward  ")[0]
    assert "  | <|system|>You can use a calculator" in prompt
    assert f"<|user|>{question}" in prompt
    assert prompt.rstrip().endswith("?<|im_end|><|assistant|>")
    assert "tools       none of tools.use" in result.stdout


@pytest.mark.parametrize(
    ("flag", "fragments"),
    [
        ("--config.rollout.slotz=3", ("config.rollout.slotz", "did you mean rollout.slots")),
        (
            "--config.task.arguments.holdout=0",
            ("config.task.arguments: ", "no 'holdout'", "--config.task.arguments=\"{'holdout': 0}\""),
        ),
        ("--config.rollout.bucket_mib=64", ("rollout.bucket_mib is now rollout.chunk_mib",)),
        ("--config.roolout.slots=3", ("config.roolout", "did you mean rollout")),
        (
            "--config.rollout.slots=many",
            ("--config.rollout.slots: 'many' is not a whole number; for example --", "=64"),
        ),
        (
            "--config.optimizer.learning_rate=fast",
            ("'fast' is not a number; for example --config.optimizer.learning_rate=0.001",),
        ),
        ("--config.elastic.resize=maybe", ("'maybe' is not True or False; for example --config.elastic.resize=False",)),
        ("--config.rollout.slots=0", ("config.rollout.slots", "must be positive")),
        ("--config.algorithm.advantage=gppo", ("config.algorithm.advantage", "did you mean 'grpo'")),
        ("--config.rollout.tensor_parallel=(3,)", ("config.rollout.tensor_parallel", "1, 2, 4, 8")),
        ("--config.rollout.tensor_parallel=(8,)", ("config.rollout.tensor_parallel: 8 does not divide",)),
        ("--config.trainer.fsdp=3", ("config.trainer.rows_per_micro_batch", "does not divide", "3 shards")),
        ("--config.model.preset=Qwen3-1.8B", ("Qwen3-1.8B", "Qwen3-1.7B")),
        ("--config.model.path=/nowhere/model", ("/nowhere/model: no such model directory",)),
        (
            "--config.task.environment=libra_jax.examples.calculator:enviroment",
            (
                "config.task.environment: libra_jax.examples.calculator has no 'enviroment'; did you mean "
                "'environment'?",
            ),
        ),
        (
            "--config.task.source=no_such_package.tasks:source",
            ("config.task.source: there is no module 'no_such_package.tasks'",),
        ),
        (
            "--config.rollout.max_context=100000",
            ("config.trainer.row_tokens: the longest row (256)", "(rollout.max_context = 100000)"),
        ),
        ("--config.model.attention=cudnn", ("model.attention: cudnn needs a GPU (this is cpu); use auto or chunked",)),
        ("--config.trainer.platform=gpu", ("config.trainer.platform: 'gpu' is not one of ", "did you mean 'cuda'?")),
        ("--steps=3", ("there is no flag --steps; did you mean --config.steps?",)),
        ("--learning_rate=1", ("--config.optimizer.learning_rate or --config.warm_start.learning_rate?",)),
        ("--stepz=3", ("there is no flag --stepz; ",)),
    ],
)
def test_a_bad_setting_is_refused_with_one_sentence_that_names_it(flag: str, fragments: tuple[str, ...], tmp_path):
    scripts.assert_one_sentence(train(QUICKSTART, flag, f"--workdir={tmp_path / 'run'}"), *fragments)
    assert not (tmp_path / "run").exists(), "a refused config must leave no workdir behind"


@pytest.mark.parametrize("arguments", [(), ("--config.steps=1",)])
def test_without_a_config_the_usage_is_shown_and_nothing_is_started(arguments, tmp_path):
    result = train(*arguments, f"--workdir={tmp_path / 'run'}")
    scripts.assert_one_sentence(result, "error: no --config is given")
    assert result.returncode == 2
    assert "usage: python launch/train.py --config=configs/quickstart.py" in result.stderr
    assert "configs/questions.py" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_reward_function_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    functions = "--config.reward.functions={'mine': {'factory': 'reward_functions:refusing'}}"
    path = {"PYTHONPATH": f"{scripts.ROOT / 'tests/common'}:{scripts.ROOT}"}
    for rest in ("--dry_run", f"--workdir={tmp_path / 'run'}"):
        result = train(QUICKSTART, functions, rest, environment=path)
        scripts.assert_one_sentence(result, "config.reward.functions.mine.arguments: ", "RuntimeError: no licence")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_what_is_not_here_without_the_settings(tmp_path):
    (tmp_path / "flights.jsonl").write_text("{}")
    offline, tasks = {"HF_HUB_OFFLINE": "1"}, f"--config.task.path={tmp_path / 'flight.jsonl'}"
    result = train("--config=configs/questions.py:models/NONE", tasks, "--dry_run", environment=offline)
    scripts.assert_one_sentence(result, "this run cannot start here: config.model.path: models/NONE is no folder here")
    scripts.assert_one_sentence(result, "did you mean ", "flights.jsonl? What does not depend on the model's shape was")
    assert result.stdout.startswith("policy      not known: no model at models/NONE")


@pytest.mark.parametrize(
    ("kind", "shown"), [("nan", "gave nan, which is not a finite number for the first task"), ("number", "")]
)
def test_a_dry_run_tries_the_rewards_on_the_first_task(kind, shown):
    function = {"mine": {"factory": "reward_functions:giving", "arguments": {"kind": kind}}}
    folder = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), "tests/common"])}
    result = train(QUICKSTART, f"--config.reward.functions={function}", "--dry_run", environment=folder)
    if shown:
        scripts.assert_one_sentence(
            result, f"start here: config.reward.functions.mine: reward_functions:giving {shown}"
        )
        assert "--config.steps=" not in result.stdout
    else:
        assert "  --config.steps=50\n" in result.stdout
        assert "\n  mine gave 0.5 for the first task with its own answer\n" in result.stdout


def test_a_dry_run_refuses_the_workdir_of_another_config(tmp_path):
    workdir = tmp_path / "run"
    workdirs.open_workdir(config_lib.RunConfig(), str(workdir))
    workdirs.release(workdir)
    result = train(QUICKSTART, f"--workdir={workdir}", "--dry_run")
    scripts.assert_one_sentence(result, f"--workdir={workdir} belongs to another config: ")
    assert result.returncode == 2
    new = train(QUICKSTART, f"--workdir={tmp_path / 'new'}", "--dry_run")
    assert f"\nworkdir     {tmp_path / 'new'}, new\n" in new.stdout
    assert not (tmp_path / "new").exists()


def test_a_path_is_refused_where_the_source_reads_none_even_if_it_is_missing():
    result = train(QUICKSTART, "--config.task.path=nowhere.jsonl", "--dry_run")
    scripts.assert_one_sentence(result, "config.task.path: the calculator reads no file")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("configs/nosuch.py", "no such config file"),
        ("configs/quikstart.py", "no such config file; did you mean configs/quickstart.py?"),
        ("configs/simulate.py", "is a config for launch/simulate.py; give it to that script"),
    ],
)
def test_a_config_file_that_is_missing_or_another_scripts_is_named(file, problem):
    result = train(f"--config={file}", "--config.steps=3")
    scripts.assert_one_sentence(result, f"error: --config={file}: {problem}")


def test_a_variant_of_a_config_that_has_none_is_refused():
    scripts.assert_one_sentence(train(f"{QUICKSTART}:foo"), "configs/quickstart.py: this config takes no variant")


def test_top_p_with_a_ratio_is_refused_by_the_log_prob_contract():
    scripts.assert_one_sentence(train(QUICKSTART, "--config.rollout.top_p=0.9", "--dry_run"), "rollout.top_p")


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ("", ("tasks.jsonl: holds no tasks",)),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": ', ("tasks.jsonl", "line 2")),
        ('{"promt": "1+1", "answer": "2"}\n', ("tasks.jsonl, line 1: no column 'prompt'; did you mean 'promt'?",)),
    ],
    ids=["empty", "malformed", "misnamed_column"],
)
def test_a_bad_task_file_is_refused_naming_file_and_line(content: str, fragments: tuple[str, ...], tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(content)
    result = train(
        QUICKSTART,
        "--config.task.source=libra_jax.environments.datasets:task_source",
        "--config.task.environment=libra_jax.environments.question:environment",
        f"--config.task.path={tasks}",
        "--config.warm_start.steps=0",
        f"--workdir={tmp_path / 'run'}",
    )
    scripts.assert_one_sentence(result, *fragments)


def test_a_pretrained_model_under_the_character_tokenizer_is_refused():
    result = train(REAL_SIZE, "--config.task.tokenizer=character", "--dry_run")
    scripts.assert_one_sentence(
        result, "config.task.tokenizer: 'character' has 128 tokens", "151936", "--config.task.tokenizer= (empty"
    )


def test_a_model_of_an_unknown_architecture_is_refused(model_directory, tmp_path):
    config = json.loads((model_directory / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps({**config, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    scripts.assert_one_sentence(
        train(QUICKSTART, f"--config.model.path={other}", "--dry_run"), "mamba", "llama, qwen2, qwen3"
    )


def test_a_truncated_model_directory_is_refused(model_directory, tmp_path):
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    text = (model_directory / "config.json").read_text()
    (truncated / "config.json").write_text(text[: len(text) // 2])
    result = train(QUICKSTART, f"--config.model.path={truncated}", "--dry_run")
    scripts.assert_one_sentence(result, "config.json: is not whole JSON")


def test_a_workdir_of_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    from libra_jax import config as config_lib

    workdir = tmp_path / "run"
    workdir.mkdir()
    stored = json.loads(json.dumps(config_lib.to_dict(config_lib.RunConfig()), default=list))
    (workdir / "config.json").write_text(json.dumps(stored))
    result = train(QUICKSTART, "--config.rollout.engine=fake", f"--workdir={workdir}")
    scripts.assert_one_sentence(result, str(workdir), "config.name is 'run' there and 'quickstart' here")
    warned = "warning: config.rollout.engine: fake is a test double without a model"
    assert result.stderr.count(warned) == 1, "a real start warns as a dry run does"


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "notes").write_text("not a folder")
    result = train(QUICKSTART, f"--workdir={tmp_path / 'notes'}")
    scripts.assert_one_sentence(result, "--workdir=", "choose a folder that can be written")


def test_a_model_directory_without_weights_is_refused_before_anything_starts(model_directory, tmp_path):
    result = train(QUICKSTART, f"--config.model.path={model_directory}", f"--workdir={tmp_path / 'run'}")
    scripts.assert_one_sentence(result, str(model_directory), "holds no *.safetensors")
    assert not (tmp_path / "run").exists()


def test_a_model_that_vllm_cannot_serve_on_cpu_is_refused(model_directory, tmp_path):
    shape = json.loads((model_directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 16}))
    result = train(QUICKSTART, f"--config.model.path={tmp_path}", "--dry_run")
    scripts.assert_one_sentence(result, "head_dim 16", "32, 64")


def test_a_mistyped_config_flag_is_named_before_the_usage():
    result = train("--confg=configs/quickstart.py")
    assert result.stderr.startswith("error: there is no flag --confg; did you mean --config?\nusage: python")
    assert result.returncode == 2


def test_a_dry_run_warns_after_the_config():
    result = subprocess.run(
        [sys.executable, "launch/train.py", QUICKSTART, "--config.rollout.engine=fake", "--dry_run"],
        cwd=scripts.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=True,
    )
    assert "warning: " in result.stdout
    assert "warning: " not in result.stdout.partition("\nstep        ")[0]
