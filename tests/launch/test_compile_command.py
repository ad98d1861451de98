"""`launch/compile.py` as a user meets it, up to the compiler, which tests/accelerators runs."""

import functools

import pytest
import scripts

from libra_jax import config as config_lib
from libra_jax.build import fitting
from libra_jax.models import config as model_config

compile_for = functools.partial(scripts.run_forked, "compile.py")
CONFIG = "--config=configs/qwen3_1p7b_8gpu.py"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (CONFIG, "--config.model.path=Qwen3-14B"),
            "config.model.path: Qwen3-14B does not exist here, and config.model",
        ),
        ((CONFIG, "--topology=8"), "--topology: '8' is no topology; one looks like 2x8"),
        ((CONFIG, "--config.model.preset=Qwen3-0.6B"), "run bash launch/setup.sh --accelerators"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(arguments, said, tmp_path):
    result = compile_for(*arguments, environment={"LIBRA_JAX_ACCELERATORS": str(tmp_path / "none")})
    scripts.assert_one_sentence(result, said)
    assert result.returncode == 2


def test_a_topology_larger_than_the_mesh_is_told_with_what_the_mesh_uses(tmp_path):
    nothing = {"LIBRA_JAX_ACCELERATORS": str(tmp_path / "none")}
    arguments = (CONFIG, "--config.model.preset=Qwen3-0.6B", "--config.trainer.fsdp=4")
    larger = compile_for(*arguments, "--topology=2x8", environment=nothing)
    assert "note: --topology=2x8 has 16 devices, and the mesh uses the first 4 of them; " in larger.stdout
    exact = compile_for(*arguments, "--topology=1x4", environment=nothing)
    assert "note: " not in exact.stdout


def run(**trainer: int) -> config_lib.RunConfig:
    config = config_lib.RunConfig()
    config.model.preset, config.model.remat = "Qwen3-8B", "dots"
    config.trainer.rows_per_micro_batch = 16
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    return config


def test_settings_that_fit_are_compiled_before_they_are_named():
    shape = model_config.load_preset("Qwen3-8B")
    measured = []

    def measure(config: config_lib.RunConfig) -> float:
        measured.append(config)
        trainer = config.trainer
        return 160e9 / (trainer.fsdp * trainer.tensor) + (40e9 if config.model.remat == "dots" else 10e9)

    told: list[tuple[fitting.FittedSetting, float]] = []
    found = fitting.search(run(fsdp=2), shape, 120e9, 70e9, measure, lambda *one: told.append(one))
    assert len(told) == len(measured), "each is told as soon as it is compiled"
    assert [one for one in told if one[1] <= 70e9] == found
    assert [setting.flags for setting, _ in found] == [
        "--config.model.remat=full --config.trainer.fsdp=4",
        "--config.model.remat=full --config.trainer.tensor=2",
        "--config.model.remat=full --config.trainer.fsdp=8",
    ]
    assert all(needed <= 70e9 and needed == measure(setting.config) for setting, needed in found)
    assert len(measured) <= fitting.MOST_TRIED + len(found)


def test_settings_that_do_not_divide_are_not_offered():
    shape = model_config.load_preset("Qwen3-8B")
    offered = [setting.config.trainer for setting in fitting.candidates(run(fsdp=8, tensor=4), shape)]
    assert offered
    for trainer in offered:
        assert trainer.rows_per_micro_batch % (trainer.data * trainer.fsdp) == 0
        assert shape.num_kv_heads % trainer.tensor == 0


def test_an_interrupted_search_has_told_what_it_found():
    shape, told = model_config.load_preset("Qwen3-8B"), []

    def measure(config: config_lib.RunConfig) -> float:
        if len(told) == 2:
            raise KeyboardInterrupt
        return 60e9

    with pytest.raises(KeyboardInterrupt):
        fitting.search(run(fsdp=2), shape, 120e9, 70e9, measure, lambda setting, _: told.append(setting.flags))
    assert len(told) == 2
    assert all(flags.startswith("--config.") for flags in told)
