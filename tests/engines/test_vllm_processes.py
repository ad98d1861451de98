"""vLLM's processes: they end with their front end, and one that does not start or fails is a sentence."""

import asyncio
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import vllm_host

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_engine
from libra_jax.models import config as models_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PARENT = """
import asyncio, json, signal
from libra_jax import config as config_lib
from libra_jax.models import config as models_config
from libra_jax.engines import vllm_engine

async def main():
    rollout = config_lib.to_dict(config_lib.RolloutConfig(max_context=64, max_tokens=8, slots=4, kv_cache_gib=0.05))
    shape = models_config.to_hf(models_config.load_preset("libra-tiny"))
    engine = vllm_engine.create("orphan", shape, rollout, 2, seed=0)
    info = await engine.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps([list(info.process_ids), sorted(engine._launch.segments)]), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.multiprocess
def test_a_killed_front_end_takes_its_engine_with_it_and_ctrl_c_reaches_the_front_end_alone():
    # A short path, unlike pytest's own: sockets live in it, and their names have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="libra-") as directory:
        script = pathlib.Path(directory, "front_end.py")
        script.write_text(PARENT)
        environment = {**os.environ, "TMPDIR": directory}
        command = [sys.executable, str(script)]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        try:
            pids, segments = json.loads(parent.stdout.readline())
            assert len(pids) == 3  # vLLM's core and its workers
            os.killpg(parent.pid, signal.SIGINT)
            time.sleep(2.0)
            assert not any(vllm_host.is_gone(pid) for pid in pids)
        finally:
            parent.kill()
            parent.stdout.close()
            parent.wait()
        assert vllm_host.wait_until(lambda: all(vllm_host.is_gone(pid) for pid in pids))
    # Named memory between several workers, which vLLM makes and no one is left to remove; a single worker has none.
    for segment in segments:
        pathlib.Path("/dev/shm", segment).unlink(missing_ok=True)


def test_settings_that_vllm_refuses_are_a_sentence_and_leave_no_process():
    rollout = dataclasses.replace(vllm_host.ROLLOUT, max_context=vllm_host.QWEN3.max_position_embeddings + 1)

    async def body():
        engine = vllm_engine.create(
            "refused", models_config.to_hf(vllm_host.QWEN3), config_lib.to_dict(rollout), 1, seed=0
        )
        try:
            await engine.start()
        finally:
            await engine.shutdown()

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(protocols.WorkerLost, match=r"engine refused did not start: .*2049") as caught:
        asyncio.run(body())
    assert "\n" not in str(caught.value)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


def test_a_failed_call_costs_an_engine_of_several_workers_but_not_one_of_a_single_worker():
    async def failing():
        raise RuntimeError("Worker failed with error 'bytes are damaged', please check the stack trace above")

    async def outcome(tensor_parallel: int) -> str:
        binding = "|".join("0" * tensor_parallel)
        engine = vllm_engine.create(
            "e",
            models_config.to_hf(vllm_host.QWEN3),
            config_lib.to_dict(vllm_host.ROLLOUT),
            tensor_parallel,
            0,
            cpu_cores=binding,
        )
        engine._death = asyncio.get_running_loop().create_future()
        with pytest.raises(protocols.LibraError, match="could not load: bytes are damaged") as caught:
            await engine._call("load", failing())
        return caught.type.__name__

    assert [asyncio.run(outcome(degree)) for degree in (1, 2)] == ["LibraError", "WorkerLost"]


def test_more_workers_than_cores_are_refused_by_field(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(protocols.ConfigError, match="tensor_parallel: 2 workers on CPU need a core each, and only 1"):
        vllm_engine.create(
            "wide", models_config.to_hf(vllm_host.QWEN3), config_lib.to_dict(vllm_host.ROLLOUT), 2, seed=0
        )
