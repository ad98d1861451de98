"""What the start of an engine does to the environment, and to other starts; no engine is started."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import tempfile
import threading
import types

import psutil
import pytest
from vllm.utils import network_utils

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_engine, vllm_launch, vllm_plugin
from libra_jax.models import config as model_config
from libra_jax.utils import scratch


def launch(name: str, tensor_parallel: int = 1) -> vllm_launch.EngineLaunch:
    return vllm_launch.EngineLaunch(name, {"vocab_size": 8}, config_lib.RolloutConfig(), tensor_parallel, 0, "auto", "")


def test_named_cores_are_bound_and_one_that_is_not_there_is_refused():
    core = min(os.sched_getaffinity(0))
    assert vllm_launch.core_binding(str(core), 1) == str(core)
    assert vllm_launch.core_binding("auto", 1) == vllm_launch.core_binding("nobind", 1) == "nobind"
    with pytest.raises(protocols.ConfigError, match=r"config\.rollout\.cores: there is no core 4095"):
        vllm_launch.core_binding(f"{core}|4095", 2)


def test_only_engines_that_return_experts_skip_vllms_check_of_them(monkeypatch):
    seen = []
    check = vllm_plugin._unless_routing(seen.append)
    monkeypatch.delenv(vllm_plugin.ROUTING_VARIABLE, raising=False)
    check("without experts")
    monkeypatch.setenv(vllm_plugin.ROUTING_VARIABLE, "1")
    check("with experts")
    assert seen == ["without experts"]


def test_only_rotary_embeddings_without_weights_are_left_out_of_the_log():
    def is_news(layer):
        record = logging.LogRecord("vllm", logging.WARNING, "", 0, "%s: Failed to load weights", (layer,), None)
        return vllm_plugin._is_news(record)

    assert [is_news(layer) for layer in ("RotaryEmbedding", "Llama3RotaryEmbedding", "QKVParallelLinear")] == [
        False,
        False,
        True,
    ]


def test_an_engine_stops_listening_before_its_processes_end(monkeypatch):
    async def body():
        shape = model_config.to_hf(model_config.load_preset("libra-tiny"))
        engine = vllm_engine.create("e", shape, config_lib.to_dict(config_lib.RolloutConfig()), 1, seed=0)
        listening = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        engine._engine = types.SimpleNamespace(output_handler=listening)
        stopped = []
        monkeypatch.setattr(engine._launch, "stop", lambda: stopped.append(listening.cancelling()))
        await engine.shutdown()
        return stopped

    assert asyncio.run(body()) == [1]


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


@pytest.fixture
def spawning(monkeypatch):
    """vLLM without processes: an engine is ready when both have spawned theirs. Yields (log, lock is held) of each."""
    together, seen = threading.Barrier(2), {}

    @contextlib.contextmanager
    def launch_core_engines(name):
        seen[name] = os.environ[vllm_launch.vllm_plugin.LOG_VARIABLE], vllm_launch._spawning.locked()
        core = types.SimpleNamespace(pid=os.getpid())
        yield types.SimpleNamespace(engine_manager=types.SimpleNamespace(processes=[core]))
        together.wait(30)
        logging.getLogger("vllm").error(f"ValueError: of {name}")
        if name == "second":
            raise RuntimeError("Engine core initialization failed")

    class Engine:
        @classmethod
        def from_engine_args(cls, name, stat_loggers):
            with vllm_launch.core_client.launch_core_engines(name):
                return cls()

        def shutdown(self, timeout):
            pass

    monkeypatch.setattr(vllm_launch, "_launch_core_engines", launch_core_engines)
    monkeypatch.setattr(vllm_launch.async_llm, "AsyncLLM", Engine)
    monkeypatch.setattr(vllm_launch.EngineLaunch, "_arguments", lambda self: self.name)
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: None)  # the "core" is this process
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: ([], []))
    return seen


def test_engines_spawn_one_by_one_and_load_side_by_side(spawning):
    launches, order = [launch("first"), launch("second")], []
    starts = [vllm_launch.STARTER.submit(item.start, lambda item=item: order.append(item.name)) for item in launches]
    starts[0].result(40)
    with pytest.raises(protocols.WorkerLost, match=r"engine second did not start: ValueError: of second$"):
        starts[1].result(40)
    assert sorted(order) == ["first", "second"]
    assert {name: path for name, (path, _) in spawning.items()} == {item.name: str(item._log) for item in launches}
    assert all(locked for _, locked in spawning.values())
    assert not vllm_launch._spawning.locked()
    assert vllm_launch.vllm_plugin.LOG_VARIABLE not in os.environ
    launches[0].stop()


def test_an_engine_on_another_device_than_a_cpu_is_left_its_threads(monkeypatch):
    assert launch("cpu")._variables()["OMP_NUM_THREADS"]
    monkeypatch.setattr(vllm_launch, "current_platform", types.SimpleNamespace(is_cpu=lambda: False))
    assert not [name for name in launch("gpu", 8)._variables() if "OMP_" in name]


def test_workers_of_an_engine_meet_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(network_utils, "tempfile", tempfile)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: types.SimpleNamespace(pid=os.getppid()))
    for name in (vllm_plugin.LOG_VARIABLE, vllm_plugin.PARENT_DEATH_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    vllm_plugin.register()
    assert network_utils.get_file_store_init_method().startswith(f"file://{tmp_path}/{scratch.MEETING}")
