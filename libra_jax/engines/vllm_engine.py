"""A rollout instance on vLLM (V1, `AsyncLLM`): `protocols.RolloutEngine` over vLLM's own processes.

Written against vLLM 0.32. The engine never sees the trainer's files. It starts from a config.json with dummy weights,
takes tokens and returns tokens, and gets every weight through the four weight verbs. Tested on CPU with the memfd
transport, tensor parallel 1 and 2. The ipc and nccl transports use vLLM's own CUDA engines, which were
not run on CUDA (`vllm_weight_sender`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

# Before vLLM, because it silences vLLM's warnings about the machine, which come at import.
from libra_jax.engines import vllm_launch

# isort: split
import torch
import vllm
import vllm.platforms
from vllm import exceptions as vllm_exceptions
from vllm.distributed.weight_transfer import base as weight_transfer
from vllm.inputs import engine as engine_inputs
from vllm.v1.engine import async_llm, exceptions

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_lora, vllm_requests, vllm_weights
from libra_jax.planning.costs import hardware
from libra_jax.utils import turns

T = TypeVar("T")


def create(
    name: str,
    model_config: Mapping[str, Any],
    rollout: Mapping[str, Any],
    tensor_parallel: int,
    seed: int,
    cpu_cores: str = "auto",
    log_path: str = "",
    hybrid: bool = False,
    lora: Mapping[str, Any] | None = None,
    return_routing: bool = False,
    accelerator: str = "",
) -> VllmEngine:
    """Makes an instance. `start` starts its processes.

    Args:
      name: name of the instance, for errors and the timeline.
      model_config: content of the model's Hugging Face config.json.
      rollout: fields of `config_lib.RolloutConfig`.
      tensor_parallel: number of devices (on CPU: worker processes) that share the weights.
      seed: seed of the engine's sampler.
      cpu_cores: on CPU, vLLM's VLLM_CPU_OMP_THREADS_BIND, or "auto" (`vllm_launch.core_binding`).
      log_path: file for vLLM's log. If empty, the log is kept only until shutdown.
      hybrid: True if the engine will be put to sleep. It then uses memory that vLLM can free.
      lora: fields of `config_lib.LoraConfig`, if weight syncs bring an adapter for vLLM's LoRA runtime; else None.
      return_routing: return the experts of every token (`protocols.TokenDelta.routing`).
      accelerator: name of the accelerator to report, if instances have unlike ones (`rollout.accelerators`).

    Raises:
      ConfigError: a rollout field cannot be used; the device is another accelerator; or this machine lacks the cores,
        the CUDA device or the package that the settings need.
    """
    settings = config_lib.parse(config_lib.RolloutConfig, rollout, "rollout.")
    if settings.transport != "memfd" and not torch.cuda.is_available():
        raise protocols.ConfigError(
            f"config.rollout.transport: {settings.transport!r} needs CUDA, which torch does not find here; use 'memfd'"
        )
    adapter = config_lib.parse(config_lib.LoraConfig, lora or {}, "model.lora.")
    launch = vllm_launch.EngineLaunch(
        name, model_config, settings, tensor_parallel, seed, cpu_cores, log_path, hybrid, adapter, return_routing
    )
    _check_accelerator(name, accelerator)
    update = vllm_weights.Checker(name, model_config, adapter)
    return VllmEngine(name, settings, tensor_parallel, launch, update, accelerator)


def _check_accelerator(name: str, accelerator: str) -> None:
    """Refuses an instance whose device is another accelerator than the config says, if its device has a sheet."""
    if not accelerator or vllm.platforms.current_platform.is_cpu():
        return
    device = vllm.platforms.current_platform.get_device_name()
    there = hardware.DEVICE_KINDS.get(device, accelerator)
    if there != accelerator:
        raise protocols.ConfigError(
            f"config.rollout.accelerators: {accelerator!r} is named for {name}, which has a {device}; name {there!r} "
            "there, or name the hosts so that instances come to the accelerators that are meant for them"
        )


class VllmEngine(protocols.RolloutEngine):
    """A rollout instance on vLLM, made by `create`. Lives on one event loop; not thread-safe."""

    def __init__(
        self,
        name: str,
        rollout: config_lib.RolloutConfig,
        tensor_parallel: int,
        launch: vllm_launch.EngineLaunch,
        update: vllm_weights.Checker,
        accelerator: str = "",
    ) -> None:
        self._accelerator = accelerator
        self.name = name
        self._rollout = rollout
        self._tensor_parallel = tensor_parallel
        self._launch = launch
        self._update = update
        self._loading = False
        self._init_info: Mapping[str, Any] | None = None
        self._lora_request: vllm_lora.request.LoRARequest | None = None  # from the first adapter on
        self._starting: asyncio.Future[async_llm.AsyncLLM] | None = None
        self._engine: async_llm.AsyncLLM | None = None
        self._watches: list[int] = []
        self._running = 0
        self._reason = "it is not running"

    async def start(self) -> protocols.EngineInfo:
        """Starts vLLM's processes (about 20 s) off the event loop."""
        loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = loop.create_future()
        # The cluster may set other variables from then on.
        self._starting = loop.run_in_executor(vllm_launch.STARTER, self._launch.start, turns.ending())
        # If a deadline cancels this call, the start continues in its thread, and shutdown ends its processes. Its
        # exception is retrieved here, because no one awaits it then.
        self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())
        self._engine = engine = await asyncio.shield(self._starting)
        for process in self._launch.processes:
            # vLLM's own notice of a process's end takes a second, and leaves some waits unanswered.
            try:
                watch = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self._die(f"its process {process.pid} ended while it started")
                break
            self._watches.append(watch)
            loop.add_reader(watch, self._die, f"its process {process.pid} ended", True)
        cache = engine.vllm_config.cache_config  # the core process has reported the number of blocks
        return protocols.EngineInfo(
            name=self.name,
            tensor_parallel=self._tensor_parallel,
            slots=self._rollout.slots,
            max_context=self._rollout.max_context,
            process_ids=tuple(process.pid for process in self._launch.processes),
            cache_tokens=(cache.num_gpu_blocks or 0) * (cache.block_size or 0),
            accelerator=self._accelerator,
        )

    def _die(self, reason: str, in_log: bool = False) -> None:
        """Fails every running and later call. `in_log`: the engine's log may name the cause."""
        if not self._death.done():
            cause = self._launch.reason() if in_log else ""
            self._reason = f"{reason}: {cause}" if cause else reason
            self._death.set_result(None)
            if self._engine is not None:
                self._engine.output_processor.propagate_error(exceptions.EngineDeadError())
        for watch in self._watches:
            asyncio.get_running_loop().remove_reader(watch)
            os.close(watch)
        self._watches.clear()

    def _lost(self) -> protocols.WorkerLost:
        return protocols.WorkerLost(f"engine {self.name} is gone ({self._reason})")

    def _serving(self) -> async_llm.AsyncLLM:
        if self._engine is None or self._death.done():
            raise self._lost()
        return self._engine

    async def _call(self, what: str, work: Awaitable[T]) -> T:
        """Awaits a call into the engine's processes, which never answer if they die meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self._death.done():
            raise self._lost()
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, exceptions.EngineDeadError):
            raise self._lost()
        problem = f"could not {what}: {_sentence(error)}"
        if self._tensor_parallel > 1:
            # One worker failed. vLLM 0.32 leaves the others' answers in its queues, as answers to the next calls.
            self._die(f"it {problem}")
            raise self._lost()
        raise protocols.LibraError(f"engine {self.name} {problem}") from None

    async def generate(self, request: protocols.GenerationRequest) -> AsyncIterator[protocols.TokenDelta]:
        engine = self._serving()
        room = self._rollout.max_context - len(request.token_ids)
        if room <= 0:
            raise protocols.LibraError(
                f"request {request.request_id} has {len(request.token_ids)} tokens, which leaves no room in engine "
                f"{self.name}'s context of {self._rollout.max_context}: raise config.rollout.max_context"
            )
        if (largest := max(request.token_ids, default=-1)) >= self._update.vocab_size:
            raise protocols.LibraError(
                f"request {request.request_id} holds token {largest}, which the model's vocabulary of "
                f"{self._update.vocab_size} does not have: use the tokenizer the model was made with"
            )
        prompt = engine_inputs.tokens_input(list(request.token_ids))
        params = vllm_requests.sampling_params(request.sampling, room, request.routed_tokens)
        queue, finished = None, False
        self._running += 1
        try:
            queue = await engine.add_request(request.request_id, prompt, params, lora_request=self._lora_request)
            # Keep the state: vLLM forgets it when the request ends, perhaps before its last output is read here.
            state = engine.output_processor.request_states.get(queue.request_id)
            sent, routing = 0, vllm_requests.RoutedExperts(state, len(request.token_ids) - request.routed_tokens)
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                completion = output.outputs[0]
                new = len(completion.token_ids)
                yield vllm_requests.delta(completion, state, sent, routing.take(completion, new))
                sent += new
        except exceptions.EngineDeadError:
            finished = True
            if not self._death.done():
                self._die(self._launch.reason() or "it stopped answering")
            raise self._lost() from None
        except (ValueError, vllm_exceptions.VLLMClientError, exceptions.EngineGenerateError) as error:
            raise protocols.LibraError(
                f"engine {self.name} refused request {request.request_id}: {_sentence(error.__cause__ or error)}"
            ) from None
        finally:
            self._running -= 1
            if queue is not None:
                queue.close()
                # The caller closed the iterator early: vLLM must free the slot.
                if not finished and not self._death.done():
                    await engine.abort(queue.request_id, internal=True)

    async def pause(self) -> None:
        """Freezes decoding, keeps requests, and drops all keys and values, which are recomputed after `resume`."""
        # Not `AsyncLLM.pause_generation`, which sleeps 20 ms so that outputs are read first. Here each output carries
        # the version that sampled it, so a late read stamps it correctly.
        await self._call("pause", self._serving().engine_core.pause_scheduler_async(mode="keep", clear_cache=True))

    async def resume(self) -> None:
        await self._call("resume", self._serving().resume_generation())

    async def sleep(self) -> None:
        """Aborts running requests. Frees weights and cache if vLLM's platform can (CUDA); otherwise only stops.

        vLLM's CPU worker has no sleep mode: its memory stays allocated, and only its cores become free.
        """
        engine = self._serving()
        if self._launch.sleeps:
            # Level 2 drops the weights, too: the next update brings new ones.
            self._update.frozen = ""
            await self._call("go to sleep", engine.sleep(level=2))
        else:
            await self._call("stand still", engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=True))

    async def wake(self) -> None:
        """Allocates the memory again. The weights are undefined until the next update, which `resume` follows."""
        engine = self._serving()
        if self._launch.sleeps:
            await self._call("wake up", engine.wake_up())
        await self.health()

    async def init_weight_transfer(self, transport: Mapping[str, Any]) -> None:
        """Opens the weight transport. The CUDA transports connect later, at their first chunk."""
        kind = transport.get("kind")
        if kind != self._rollout.transport:
            raise protocols.ConfigError(
                f"config.rollout.transport: engine {self.name} was started for {self._rollout.transport!r}, "
                f"not {kind!r}"
            )
        if kind == "memfd":
            request = weight_transfer.WeightTransferInitRequest(init_info={})
            await self._call("open the weight transport", self._serving().init_weight_transfer_engine(request))

    async def start_weight_update(self, policy_version: int) -> None:
        engine = self._serving()
        if self._loading:
            # An update that was refused midway has left vLLM's session open.
            await self._call("give up a weight update", engine.finish_weight_update())
        self._update.start(policy_version)
        await self._call("prepare for new weights", engine.start_weight_update())
        self._loading = True

    async def update_weights(self, chunk: protocols.WeightChunk) -> None:
        engine = self._serving()
        if not self._update.add(chunk):
            return
        info = vllm_weights.payload(chunk, self.name, self._update.scale)
        request = weight_transfer.WeightTransferUpdateRequest(update_info=info)
        init_info = chunk.transport.get("instances", {}).get(self.name, {}).get("init_info")
        if init_info is not None and init_info != self._init_info:
            opening = weight_transfer.WeightTransferInitRequest(init_info=dict(init_info))
            await self._call("open the weight transport", engine.init_weight_transfer_engine(opening))
            self._init_info = init_info
        self._loading = False  # an error in a worker closes vLLM's session
        await self._call(f"load weight chunk {chunk.index}", engine.update_weights(request))
        self._loading = True

    async def finish_weight_update(self, policy_version: int) -> None:
        engine = self._serving()
        self._update.finish(policy_version)
        await self._call("finish its weight update", engine.finish_weight_update(weight_version=str(policy_version)))
        self._update.confirm()
        self._loading = False
        if self._update.scale is not None:
            self._lora_request = vllm_lora.REQUEST

    async def health(self) -> Mapping[str, float]:
        """Asks the engine's core process. Raises `WorkerLost` if it is gone. `running` counts requests here."""
        paused = await self._call("answer", self._serving().is_paused())
        return {"running": float(self._running), "paused": float(paused)}

    async def shutdown(self) -> None:
        loop = asyncio.get_running_loop()
        if self._starting is not None:
            while not self._starting.done():
                self._launch.cancel()
                await asyncio.wait((self._starting,), timeout=0.5)
            self._die("it was shut down")
        if self._engine is not None and self._engine.output_handler is not None:
            # Else it would log the end of the processes that are to end as an error.
            self._engine.output_handler.cancel()
        await loop.run_in_executor(None, self._launch.stop)
        self._engine = self._starting = None
        # AsyncLLM is in reference cycles. Its finaliser fails if it first runs at the interpreter's exit.
        gc.collect()


def _sentence(error: BaseException) -> str:
    """Returns the cause of an error in a worker, without vLLM's wrapping."""
    text = " ".join(str(error).split())
    wrapped = re.search(r"Worker failed with error '(.*)', please check", text)
    return (wrapped.group(1) if wrapped else text).rstrip(".")
