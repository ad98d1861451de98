"""Settings that cannot do what they say, or that spoil learning, are refused or warned of by name."""

from __future__ import annotations

import dataclasses

import pytest
import scripts

from configs import questions
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.config import advice
from libra_jax.models import config as model_config
from libra_jax.models import feasibility


@pytest.mark.parametrize(("name", "value"), [("clip_low", 0.1), ("clip_high", 0.28), ("dual_clip", 3.0)])
def test_clips_that_cannot_bind_are_refused(name, value):
    algorithm = config_lib.AlgorithmConfig(objective="decoupled", **{name: value})
    with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.{name}: {value} never binds .* leave it at"):
        config_lib.RunConfig(algorithm=algorithm)
    config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(**{name: value}))


def test_the_decoupled_objective_takes_default_clips():
    run = config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(objective="decoupled", correction="truncated"))
    assert run.algorithm.clip_high == config_lib.AlgorithmConfig().clip_high


@pytest.mark.parametrize(
    ("changed", "reading", "sentence"),
    [
        (
            {"dual_clip": 3.0, "loss": "cispo"},
            {"loss": "gspo"},
            r"dual_clip: 3 has no effect with algorithm\.loss=cispo",
        ),
        (
            {"correction_cap": 1.5},
            {"correction": "masked"},
            r"correction_cap: 1\.5 has no effect with algorithm\.correction=none; leave it at 2, or set",
        ),
        (
            {"sequence_length_constant": 512.0},
            {"aggregation": "sequence_sum"},
            r"sequence_length_constant: 512 has no effect with algorithm\.aggregation=token_mean",
        ),
    ],
)
def test_a_changed_setting_that_nothing_reads_is_refused_with_its_partner(changed, reading, sentence):
    with pytest.raises(protocols.ConfigError, match=rf"config\.algorithm\.{sentence}"):
        config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(**changed))
    config_lib.RunConfig(algorithm=config_lib.AlgorithmConfig(**changed | reading))


@pytest.mark.parametrize("temperature", [0.005, 2.5, 0.0])
def test_temperatures_that_vllm_does_not_sample_at_are_refused(temperature):
    with pytest.raises(protocols.ConfigError, match=rf"rollout\.temperature: .*\[0\.01, 2\].*not {temperature}"):
        config_lib.RolloutConfig(temperature=temperature)
    if temperature:
        with pytest.raises(protocols.ConfigError, match=rf"evaluation\.temperature: .*\[0\.01, 2\].*not {temperature}"):
            config_lib.EvaluationConfig(temperature=temperature)
    config_lib.RolloutConfig(temperature=0.01)
    config_lib.EvaluationConfig(temperature=0.0)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_bounds_of_temperature_are_those_of_vllm():
    sampling_params = pytest.importorskip("vllm.sampling_params")
    exceptions = pytest.importorskip("vllm.exceptions")
    least, most = config_lib.LEAST_TEMPERATURE, config_lib.MOST_TEMPERATURE
    assert sampling_params.SamplingParams(temperature=least).temperature == least
    assert sampling_params.SamplingParams(temperature=least / 2).temperature == least, "it samples at another one"
    sampling_params.SamplingParams(temperature=most)
    with pytest.raises(exceptions.VLLMValidationError, match="temperature"):
        sampling_params.SamplingParams(temperature=most + 0.01)


def test_bfloat16_master_weights_are_refused_with_the_reason():
    with pytest.raises(protocols.ConfigError, match=r"model\.param_dtype: bfloat16 .* rounds .* keep float32"):
        config_lib.ModelConfig(param_dtype="bfloat16")


def test_a_qwen2_with_a_head_width_of_its_own_is_refused_for_vllm():
    usual = dataclasses.replace(model_config.load_preset("libra-tiny"), architecture="qwen2", num_heads=2, head_dim=64)
    own = dataclasses.replace(usual, hidden_size=128, head_dim=32)
    with pytest.raises(protocols.ConfigError, match=r"head_dim 32 .* hidden_size / num_attention_heads = 64"):
        feasibility.check_served(own)
    feasibility.check_served(dataclasses.replace(own, head_dim=64))
    feasibility.check_served(dataclasses.replace(own, architecture="qwen3"))


# Warnings -------------------------------------------------------------------------------------------------------------

TOY = {"model": config_lib.ModelConfig(path="models/Qwen3-1.7B")}
"""Pretrained weights, and everything else as the character model has it."""

SOUND = {
    "model": config_lib.ModelConfig(path="models/Qwen3-1.7B", compute_dtype="bfloat16", remat="dots"),
    "optimizer": config_lib.OptimizerConfig(learning_rate=1e-6),
    "rollout": config_lib.RolloutConfig(dtype="bfloat16", max_tokens=1024, max_context=4096),
    "trainer": config_lib.TrainerConfig(row_tokens=4096),
}


def warned(parameters=1_700_000_000, accelerated=True, **groups):
    """The fields that a run is warned of, in order."""
    found = advice.advice(config_lib.RunConfig(**groups), parameters=parameters, accelerated=accelerated)
    return [sentence.split(":")[0].removeprefix("config.") for sentence in found]


def test_settings_that_pretrained_weights_do_not_survive_are_warned_of():
    numbers = ["model.compute_dtype", "rollout.dtype"]
    rate = ["optimizer.learning_rate", "rollout.max_tokens"]
    assert warned(**TOY) == [*rate, *numbers, "model.remat"]
    assert warned(**TOY, accelerated=False) == [*rate, "model.remat"]
    assert warned(**TOY, accelerated=False, parameters=1_000_000) == rate
    assert warned(**SOUND) == []
    warm = config_lib.WarmStartConfig(steps=10)
    unlimited = config_lib.OptimizerConfig(learning_rate=1e-6, clip_norm=0.0)
    assert warned(**SOUND | {"optimizer": unlimited}, warm_start=warm) == [
        "warm_start.learning_rate",
        "optimizer.clip_norm",
    ]
    adapter = dataclasses.replace(TOY["model"], lora=config_lib.LoraConfig(rank=8))
    assert "optimizer.learning_rate" not in warned(**TOY | {"model": adapter}), "the weights stay as they are"
    assert warned(parameters=410_000) == [], "the shipped character model is what the defaults are for"


@pytest.mark.parametrize(
    "advantage", [name for name in config_lib.ADVANTAGES if name not in ("gae", "egae", "distillation")]
)
def test_a_group_of_one_is_warned_of(advantage):
    groups = {
        "algorithm": config_lib.AlgorithmConfig(advantage=advantage),
        "coordinator": config_lib.CoordinatorConfig(group_size=1),
    }
    wanted = [] if advantage == "reinforce_plus_plus" else ["coordinator.group_size"]
    assert warned(parameters=1, **groups) == wanted


def test_settings_of_a_kl_term_that_is_off_are_warned_of_and_may_be_swept():
    settings = {"kl_in_reward": True, "kl_estimator": "k1"}
    fields = ["algorithm.kl_in_reward", "algorithm.kl_estimator"]
    assert warned(parameters=1, algorithm=config_lib.AlgorithmConfig(**settings)) == fields
    assert warned(parameters=1, algorithm=config_lib.AlgorithmConfig(**settings, kl_coefficient=0.1)) == []


def test_gspo_is_warned_of_settings_for_ratios_of_tokens():
    fields = ["algorithm.aggregation", "algorithm.clip_low"]
    assert warned(parameters=1, algorithm=config_lib.AlgorithmConfig(loss="gspo")) == fields
    paper = config_lib.AlgorithmConfig(loss="gspo", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4)
    assert warned(parameters=1, algorithm=paper) == []
    decoupled = config_lib.AlgorithmConfig(loss="gspo", aggregation="sequence_mean", objective="decoupled")
    assert warned(parameters=1, algorithm=decoupled) == []


def test_settings_of_an_adapter_without_a_rank_are_warned_of():
    lora = config_lib.LoraConfig(alpha=16.0, layers=(0,))
    run = config_lib.RunConfig(
        model=config_lib.ModelConfig(lora=lora), optimizer=config_lib.OptimizerConfig(learning_rate=4e-3)
    )
    (said,) = advice.advice(run, parameters=1, accelerated=False)
    assert said.startswith("config.model.lora.rank: 0 trains all weights, at optimizer.learning_rate=0.004, and model")
    assert "model.lora.alpha, model.lora.layers will not be read" in said
    assert warned(parameters=1, model=config_lib.ModelConfig(lora=dataclasses.replace(lora, rank=8))) == []


def test_more_virtual_devices_than_cores_can_serve_are_warned_of():
    def fields(cores, **axes):
        run = config_lib.RunConfig(trainer=config_lib.TrainerConfig(**{"platform": "cpu", **axes}))
        found = advice.advice(run, parameters=1, accelerated=False, cores=cores)
        return [sentence.split(":")[0] for sentence in found]

    assert fields(2, context=16) == ["config.trainer.context"]
    assert fields(2, fsdp=2, tensor=8) == ["config.trainer.tensor"]
    assert fields(2, context=8) == fields(4, context=16) == fields(0, context=16) == []
    assert fields(2, context=16, platform="tpu") == []


def test_differences_of_float32_weights_are_warned_of():
    for dtype, wanted in (("float32", ["rollout.full_sync_every"]), ("bfloat16", [])):
        assert warned(parameters=1, rollout=config_lib.RolloutConfig(full_sync_every=20, dtype=dtype)) == wanted


def test_the_fake_engine_is_warned_of():
    assert warned(parameters=1, rollout=config_lib.RolloutConfig(engine="fake")) == ["rollout.engine"]
    result = scripts.run_forked(
        "train.py", "--config=configs/quickstart.py", "--config.rollout.engine=fake", "--dry_run"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("warning: config.rollout.engine: fake is a test double without a model") == 1
    assert "its log-probabilities made up (the mismatch" in result.stderr


def test_the_config_for_questions_chooses_by_its_weights():
    plain = config_lib.checked(questions.get_config())
    assert (plain.model.path, plain.optimizer.learning_rate, plain.task.tokenizer) == ("", 1e-3, "character")
    real = config_lib.checked(questions.get_config("models/Qwen3-1.7B"))
    assert (real.model.path, real.task.tokenizer) == ("models/Qwen3-1.7B", "")
    assert advice.advice(real, parameters=1_700_000_000, accelerated=True) == []


def test_a_dry_run_warns_by_name(tmp_path):
    tasks = tmp_path / "questions.jsonl"
    tasks.write_text("".join(f'{{"prompt": "1+{n}", "answer": "{n + 1}"}}\n' for n in range(40)))
    arguments = (f"--config.task.path={tasks}", "--config.model.preset=Qwen3-1.7B", "--config.task.tokenizer=")
    result = scripts.run_forked(
        "train.py", "--config=configs/questions.py", "--config.model.path=models/none", *arguments, "--dry_run"
    )
    assert result.returncode == 1, result.stderr  # there are no weights, which a dry run says
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings[0].startswith("warning: config.optimizer.learning_rate: 0.001 moves every pretrained weight")
