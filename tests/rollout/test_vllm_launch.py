"""What the start of an engine leaves of the environment; no engine is started."""

import os

from libra_jax.rollout import vllm_launch


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
