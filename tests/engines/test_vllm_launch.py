"""What the start of an engine leaves of the environment; no engine is started."""

import os

import pytest

from libra_jax import protocols
from libra_jax.engines import vllm_launch


def test_named_cores_are_bound_and_one_that_is_not_there_is_refused():
    core = min(os.sched_getaffinity(0))
    assert vllm_launch.core_binding(str(core), 1) == str(core)
    assert vllm_launch.core_binding("auto", 1) == vllm_launch.core_binding("nobind", 1) == "nobind"
    with pytest.raises(protocols.ConfigError, match=r"config\.rollout\.cores: there is no core 4095"):
        vllm_launch.core_binding(f"{core}|4095", 2)


def test_the_environment_is_put_back_but_for_what_another_actor_changed_meanwhile(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("LIBRA_TEST_VARIABLE", "before")
    monkeypatch.setenv("JAX_PLATFORMS", "another actor's")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    with vllm_launch._environment({"LIBRA_TEST_VARIABLE": "ours", "LIBRA_TEST_NEW": "ours"}):
        assert (os.environ["LIBRA_TEST_VARIABLE"], os.environ["LIBRA_TEST_NEW"]) == ("ours", "ours")
        os.environ["LD_PRELOAD"] = "vLLM's"
        os.environ["VLLM_TEST_VARIABLE"] = "vLLM's"
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")  # that actor's start begins
        monkeypatch.delenv("JAX_PLATFORMS")  # and another's ends
    assert (os.environ["LIBRA_TEST_VARIABLE"], os.environ["LD_PRELOAD"]) == ("before", "")
    assert not {"LIBRA_TEST_NEW", "VLLM_TEST_VARIABLE", "JAX_PLATFORMS"} & set(os.environ)
    assert os.environ["JAX_NUM_CPU_DEVICES"] == "4"
