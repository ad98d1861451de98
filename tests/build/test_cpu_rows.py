"""The rows of a micro-batch where the config leaves them open."""

import pytest

from libra_jax import config as config_lib
from libra_jax.build import cpu_rows
from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config

SHAPE = model_config.load_preset("libra-tiny")


@pytest.fixture
def caches(tmp_path):
    for number, size in enumerate(("32K", "1024K", "32M", "unknown")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size)
    return tmp_path


def rows(caches, shape=SHAPE, **trainer):
    run = config_lib.RunConfig(
        rollout=config_lib.RolloutConfig(max_context=128, max_tokens=64),
        trainer=config_lib.TrainerConfig(**{"platform": "cpu", "row_tokens": 128, **trainer}),
    )
    return cpu_rows.sized(resolved_run.ResolvedRun(run, shape), caches).config.trainer.rows_per_micro_batch


def test_activations_of_a_micro_batch_fit_the_largest_cache(caches):
    (caches / "index2" / "size").write_text("128M")
    assert rows(caches) == 32
    assert rows(caches, row_tokens=300) == 16
    assert rows(caches, row_tokens=208) == 16  # 24 would fit


def test_a_large_model_still_gets_the_least_number_of_tokens(caches):
    assert rows(caches, model_config.load_preset("Qwen3-0.6B")) == cpu_rows.LEAST_TOKENS / 128
    assert rows(caches, model_config.load_preset("Qwen3-0.6B"), row_tokens=384) * 384 >= cpu_rows.LEAST_TOKENS
    assert rows(caches, model_config.load_preset("Qwen3-0.6B"), row_tokens=65_536) == 1


def test_the_shards_share_the_cache_and_get_the_same_rows(caches):
    (caches / "index2" / "size").write_text("512M")
    assert rows(caches, data=2, fsdp=2) == 4 * 32


def test_other_platforms_and_unknown_caches_get_eight_rows_or_a_multiple_of_the_shards(caches, tmp_path):
    assert rows(caches, platform="cuda") == rows(tmp_path / "missing") == 8
    assert rows(caches, platform="cuda", data=6) == 12


def test_a_number_that_the_user_set_stays(caches):
    assert rows(caches, rows_per_micro_batch=3) == 3
