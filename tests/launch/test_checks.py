"""What a config cannot be is refused by name before any worker starts."""

import contextlib
import math
import pathlib
from importlib import metadata

import pytest

import checks
import dry_run
from libra_jax import config, protocols


@pytest.mark.parametrize(
    ("rollout", "elastic", "trainer", "backend", "sentence"),
    [
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1}, {}, "inprocess", r"elastic\.hybrid: .*cluster\.backend=ray"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 2}, {}, "ray", r"of the 2 .* fewer than elastic\.floor = 1 left"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1, "floor": 5}, {}, "ray", r"elastic\.floor: 5 instances .* has 2"),
        ({"tensor_parallel": (1, 1)}, {"hybrid": 1}, {"platform": "cuda", "fsdp": 2}, "ray", r"2 devices.* has 1;"),
        (
            {"tensor_parallel": (1, 1)},
            {"hybrid": 1, "cores": (0, 0)},
            {},
            "ray",
            r"elastic\.cores: has 2 entries for 1",
        ),
        ({"tensor_parallel": (1, 1), "dtype": "float16"}, {"hybrid": 1}, {}, "ray", r"rollout\.dtype = float16 must"),
        ({}, {"hybrid": -1}, {}, "ray", r"elastic\.hybrid: must not be negative"),
        ({}, {"spare_devices": 1}, {"processes": 2, "data": 2}, "ray", r"elastic\.spare_devices: are one process's"),
        (
            {},
            {},
            {"processes": 2, "data": 2},
            "inprocess",
            r"trainer\.processes: 2 processes need cluster\.backend=ray",
        ),
    ],
)
def test_what_the_elastic_pool_cannot_be_is_refused_by_name(rollout, elastic, trainer, backend, sentence):
    def check() -> None:
        run = config.RunConfig(
            rollout=config.RolloutConfig(**rollout),
            elastic=config.ElasticConfig(**elastic),
            trainer=config.TrainerConfig(**{"platform": "cpu", **trainer}),
            cluster=config.ClusterConfig(backend=backend),
        )
        checks._check_elastic(run)

    with pytest.raises(protocols.ConfigError, match=sentence):
        check()


@pytest.mark.parametrize("tool", ["python", "shell", "edit"])
def test_a_call_in_a_sandbox_must_end_before_its_step_does(tool):
    def run(*use: str) -> config.RunConfig:
        return config.RunConfig(
            tools=config.ToolsConfig(use=use),
            task=config.TaskConfig(tool_seconds=10.0),
            sandbox=config.SandboxConfig(seconds=9.5),
        )

    run("calculator")
    with pytest.raises(protocols.ConfigError, match=r"sandbox\.seconds: 9\.5 must be less than 95% of task\.tool_sec"):
        run("calculator", tool)
    config.RunConfig(tools=config.ToolsConfig(use=(tool,)))  # the defaults go together


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"platform": "auto"}, {}, r"trainer\.platform: auto leaves all .* to each of the 2 processes"),
        ({"platform": "cuda"}, {"transport": "nccl"}, r"rollout\.transport: 'nccl' serves a trainer of one process"),
        ({"platform": "cpu", "cores": (0,)}, {}, r"trainer\.cores: pins one process"),
    ],
)
def test_what_several_trainer_processes_cannot_have_is_refused_by_name(trainer, rollout, sentence):
    run = config.RunConfig(
        trainer=config.TrainerConfig(fsdp=2, processes=2, **trainer),
        rollout=config.RolloutConfig(**rollout),
        cluster=config.ClusterConfig(backend="ray"),
    )
    with pytest.raises(protocols.ConfigError, match=sentence):
        checks._check_processes(run)


@pytest.mark.parametrize(
    ("elastic", "rollout", "each", "sentence"),
    [
        ({}, {"transport": "ipc"}, 1, r"rollout\.transport: 'ipc' hands .* laid out over 2 hosts .* use 'memfd'"),
        ({"hybrid": 1}, {"tensor_parallel": (1, 1)}, 0, r"elastic\.hybrid: .* set cluster\.accelerators_per_host"),
        ({"hybrid": 1}, {"tensor_parallel": (1, 1)}, 1, None),
        ({}, {"transport": "nccl"}, 1, None),
        ({}, {}, 0, None),
    ],
)
def test_what_cannot_cross_hosts_is_refused_by_name(elastic, rollout, each, sentence):
    run = config.RunConfig(
        trainer=config.TrainerConfig(platform="cuda"),
        rollout=config.RolloutConfig(**rollout),
        elastic=config.ElasticConfig(**elastic),
        cluster=config.ClusterConfig(backend="ray", address="head:6379", accelerators_per_host=each),
    )
    with pytest.raises(protocols.ConfigError, match=sentence) if sentence else contextlib.nullcontext():
        checks._check_hosts(run)
        checks._check_elastic(run)


@pytest.mark.parametrize(
    ("platform", "engine", "gpus", "refused"),
    [
        ("auto", "vllm", 8, True),
        ("auto", "vllm", 1, False),  # shared because there is no other
        ("auto", "vllm", 0, False),
        ("auto", "fake", 8, False),
        ("cuda", "vllm", 8, False),
        ("cpu", "vllm", 8, False),
    ],
)
def test_auto_is_refused_where_trainer_and_engines_would_crowd_one_of_several_gpus(
    platform, engine, gpus, refused, monkeypatch
):
    monkeypatch.setattr(checks, "gpus_found", lambda: gpus)
    run = config.RunConfig(
        trainer=config.TrainerConfig(platform=platform),
        rollout=config.RolloutConfig(engine=engine, tensor_parallel=(1, 1)),
    )
    checks.validate(run, need_weights=False)
    message = r"first of 8 GPUs; use --config\.trainer\.platform=cuda.*3 in all"
    with pytest.raises(protocols.ConfigError, match=message) if refused else contextlib.nullcontext():
        checks.validate(run, need_weights=True)


@pytest.mark.parametrize(
    ("plugins", "variables", "found"),
    [
        (["xla_cuda13"], {}, 4),
        (["xla_cuda13"], {"CUDA_VISIBLE_DEVICES": "2,3"}, 2),
        (["xla_cuda13"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["xla_cuda13"], {"JAX_PLATFORMS": "cpu"}, 0),
        (["xla_cuda13"], {"JAX_PLATFORMS": "cuda,cpu"}, 4),
        (["libtpu"], {}, 0),
        ([], {}, 0),  # JAX for CPU on a machine with GPUs
    ],
)
def test_gpus_count_where_jax_would_use_them(plugins, variables, found, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    points = [metadata.EntryPoint(name, "module", "jax_plugins") for name in plugins]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    devices = [pathlib.Path(f"/dev/nvidia{ordinal}") for ordinal in range(4)]
    monkeypatch.setattr(pathlib.Path, "glob", lambda self, pattern: iter(devices))
    assert checks.gpus_found() == found


def test_a_reward_function_that_cannot_be_found_is_refused_before_anything_starts():
    wrong = {"mine": {"factory": "reward_functions:constent"}}
    run = config.RunConfig(reward=config.RewardConfig(functions=wrong))
    with pytest.raises(protocols.ConfigError, match=r"reward\.functions\.mine\.factory: .*did you mean 'constant'"):
        checks.validate(run, need_weights=False)


def test_a_dry_run_tells_the_terms_of_the_reward():
    length = {"factory": "mine:length", "weight": -0.5}
    reward = config.RewardConfig(functions={"length": length, "exact": {"factory": "mine:exact"}})
    assert dry_run._reward(config.RewardConfig()) == "the environment's own"
    assert dry_run._reward(reward) == "the environment's own + -0.5 x length (mine:length) + exact (mine:exact)"
    alone = config.RewardConfig(functions={"exact": {"factory": "mine:exact"}}, environment_weight=0.0)
    assert dry_run._reward(alone) == "exact (mine:exact)"


def test_a_context_longer_than_the_models_positions_is_refused():
    run = config.RunConfig(
        rollout=config.RolloutConfig(max_context=4096), trainer=config.TrainerConfig(row_tokens=4096)
    )
    with pytest.raises(protocols.ConfigError, match=r"rollout\.max_context: 4096 exceeds the model's 2048 positions"):
        checks.validate(run, need_weights=False)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("optimizer.learning_rate", math.nan, "must be a finite number, not nan"),
        ("optimizer.learning_rate", math.inf, "must be a finite number, not inf"),
        ("optimizer.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("warm_start.learning_rate", math.inf, "must be a finite number, not inf"),
        ("warm_start.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("optimizer.beta1", 1.0, "must lie in [0, 1), not 1.0"),
        ("optimizer.beta2", math.nan, "must lie in [0, 1), not nan"),
        ("optimizer.eps", 0.0, "must be positive, not 0.0"),
        ("optimizer.weight_decay", -0.1, "must not be negative, not -0.1"),
        ("optimizer.weight_decay", math.inf, "must be a finite number, not inf"),
        ("optimizer.clip_norm", math.nan, "must be a finite number, not nan"),
        ("algorithm.entropy_coefficient", math.nan, "must be a finite number, not nan"),
        ("algorithm.kl_coefficient", math.inf, "must be a finite number, not inf"),
        ("algorithm.sequence_length_constant", math.inf, "must be a finite number, not inf"),
        ("rollout.temperature", math.inf, "must be a finite number, not inf"),
        ("evaluation.temperature", math.inf, "must be a finite number, not inf"),
        ("rollout.gpu_memory_fraction", 1.5, "must lie in (0, 1], not 1.5"),
        ("coordinator.max_replacements", math.nan, "must be a number, not nan"),
        ("name", "", "must not be empty: it names the default workdir"),
        ("name", "a\nb", "must be printable and on one line, not 'a\\nb'"),
        ("seed", -1, "must lie in [0, 2147483647], not -1"),
        ("seed", 10**30, f"must lie in [0, 2147483647], not {10**30}"),
        ("name", "a/b", "must hold no '/', as it names the default workdir, not 'a/b'"),
    ],
)
def test_a_value_that_no_run_could_use_is_refused_naming_its_field(field, value, problem):
    for part in reversed(field.split(".")):
        value = {part: value}
    with pytest.raises(protocols.ConfigError) as caught:
        config.parse(config.RunConfig, value)
    assert str(caught.value) == f"config.{field}: {problem}"
