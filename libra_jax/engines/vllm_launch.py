# ruff: noqa: E402 (vLLM is silenced before it is imported)
"""Starts and ends vLLM's processes: arguments, environment, output, and the removal of their remains.

Written against vLLM 0.32. Engines of one process start side by side. Environment variables and vLLM's loggers belong
to the whole process, so a lock lets one engine at a time configure itself and spawn its core process. The core inherits
the variables when it is spawned, and the front end reads none afterwards. So the lock is free while the core imports
vLLM and loads the model. Each engine starts on a thread that lives as long as the process, because the kernel ties an
engine's life to the thread that started it (`parent_death`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import gc
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import process as processes_lib
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

# Importing vLLM makes 600,000 objects, none of them garbage. Without the garbage collector it takes a fifth less time.
_collects = gc.isenabled()
gc.disable()
# vLLM's modules warn about the machine while they are imported.
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
logging.getLogger("vllm").setLevel(logging.ERROR)

# isort: split
from vllm import plugins
from vllm.config import logging as vllm_logging
from vllm.engine import arg_utils
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import async_llm, core_client
from vllm.v1.executor import uniproc_executor

# Frozen, so that no later collection walks over these objects, which would hold up the event loop.
gc.freeze()
if _collects:
    gc.enable()

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import logprob_contract, vllm_lora, vllm_plugin
from libra_jax.utils import scratch

_STARTER_NAME = "vllm-start"

STARTER = concurrent.futures.ThreadPoolExecutor(max_workers=32, thread_name_prefix=_STARTER_NAME)
"""Threads on which engines start; none ends before the process does."""

_spawning = threading.Lock()
"""Held while an engine sets environment variables and spawns its core process."""

TRANSPORTS = {"memfd": vllm_plugin.TRANSPORT, "ipc": "ipc", "nccl": vllm_plugin.NCCL_TRANSPORT}
"""vLLM's names of transports, by our names."""

_VLLM_SETS = ("VLLM_", "TORCHINDUCTOR_", "NUMEXPR_MAX_THREADS", "LD_PRELOAD", "LOCAL_WORLD_SIZE", "NCCL_")
"""Prefixes of the environment variables that vLLM 0.32 sets in the process that starts it."""

_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 5.0

_Spawned = Callable[[Sequence[processes_lib.BaseProcess]], None]

_on_spawned: contextvars.ContextVar[_Spawned] = contextvars.ContextVar("on_spawned", default=lambda processes: None)
"""Called on the starting thread with vLLM's core processes, after they are spawned and before they are ready."""

_launch_core_engines = core_client.launch_core_engines


@contextlib.contextmanager
def _launch_and_tell(*arguments: Any, **keywords: Any) -> Iterator[Any]:
    """Replaces vLLM's `launch_core_engines`, which has no hook between spawning the processes and waiting for them."""
    with _launch_core_engines(*arguments, **keywords) as launch:
        yield launch
        _on_spawned.get()(launch.engine_manager.processes)
        # The end of this block waits until the core processes are ready.


core_client.launch_core_engines = _launch_and_tell


def core_binding(cpu_cores: str, workers: int) -> str:
    """Returns the value of vLLM's VLLM_CPU_OMP_THREADS_BIND.

    Args:
      cpu_cores: the value itself, or "auto". "auto" does not bind a single worker, so that several engines share the
        cores. It gives each of several workers its part of the cores that this process may use.
      workers: number of worker processes (the tensor-parallel degree).
    """
    if cpu_cores not in ("auto", "nobind"):
        config_lib.check_cores(tuple(int(core) for core in re.findall(r"\d+", cpu_cores)), "rollout.cores")
    if cpu_cores != "auto":
        return cpu_cores
    if workers == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < workers:
        raise protocols.ConfigError(
            f"config.rollout.tensor_parallel: {workers} workers on CPU need a core each, and only {len(cores)} are here"
        )
    share = len(cores) // workers
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(workers))


class EngineLaunch:
    """The processes of one engine. Methods block; `start` runs on `STARTER`.

    Its arguments are those of `vllm_engine.create`.

    Attributes:
      sleeps: True if it uses memory that vLLM can free.
      processes: vLLM's processes, the core first; empty before `start` returns.
      segments: names of the shared memory that vLLM's processes use among them.
    """

    def __init__(
        self,
        name: str,
        model_config: Mapping[str, Any],
        rollout: config_lib.RolloutConfig,
        tensor_parallel: int,
        seed: int,
        cpu_cores: str,
        log_path: str,
        hybrid: bool = False,
        lora: config_lib.LoraConfig | None = None,
        return_routing: bool = False,
    ) -> None:
        self.name = name
        self._lora = lora or config_lib.LoraConfig()
        self.sleeps = hybrid and current_platform.is_sleep_mode_available()
        self._model_config = model_config
        self._rollout = rollout
        self._tensor_parallel = tensor_parallel
        self._seed = seed
        # Devices other than CPUs leave threads to vLLM.
        self._binding = core_binding(cpu_cores, tensor_parallel) if current_platform.is_cpu() else ""
        # On CPU, vLLM runs even a single worker in its own process, because of its OpenMP variables, and the core
        # process spins until the worker answers. If the variables are set for the core process, the worker can live
        # inside it.
        self._in_core = current_platform.is_cpu() and tensor_parallel == 1
        self._log_path = log_path
        self._return_routing = return_routing
        self._scratch: scratch.Scratch | None = None
        self._directory = Path(os.devnull)
        self._log = Path(os.devnull)
        self._log_start = 0
        self._handler: _LogFile | None = None
        self._engine: async_llm.AsyncLLM | None = None
        self._ended = False
        self._cancelled = False
        self._cores: list[psutil.Process] = []
        self.processes: list[psutil.Process] = []
        self.segments: set[str] = set()

    def start(self, spawned: Callable[[], None] = lambda: None) -> async_llm.AsyncLLM:
        """Starts the processes. Returns once they serve.

        Calls `spawned` on this thread once vLLM's core process has inherited the environment variables.
        """
        window = contextlib.ExitStack()

        def close_window(processes: Sequence[processes_lib.BaseProcess]) -> None:
            self._cores = [psutil.Process(core.pid) for core in processes]
            window.close()
            spawned()

        token = _on_spawned.set(close_window)
        try:
            window.enter_context(_spawning)
            if self._cancelled:
                raise protocols.WorkerLost(f"engine {self.name} was shut down before it started")
            self._prepare()
            window.enter_context(_environment(self._variables()))
            self._engine = async_llm.AsyncLLM.from_engine_args(self._arguments(), stat_loggers=None)
            self.processes = self._cores + [child for core in self._cores for child in core.children(recursive=True)]
            for item in self.processes:
                with contextlib.suppress(psutil.Error, OSError), open(f"/proc/{item.pid}/maps") as maps:
                    self.segments.update(re.findall(r"/dev/shm/(\S+)", maps.read()))
            # If this process is killed, the next engine's start removes them.
            assert self._scratch is not None
            self._scratch.list_segments(self.segments)
        except protocols.LibraError:
            raise
        except Exception as error:
            self.processes = self._cores
            reason = self.reason() or " ".join(f"{type(error).__name__}: {error}".split())
            window.close()
            self.stop()
            raise protocols.WorkerLost(f"engine {self.name} did not start: {reason}") from None
        finally:
            window.close()
            _on_spawned.reset(token)
        return self._engine

    def _prepare(self) -> None:
        """Writes the files that vLLM's processes read, and opens the log."""
        self._scratch = scratch.Scratch(sockets=True)
        self._directory = self._scratch.path
        self._log = Path(self._log_path or self._directory / "engine.log").absolute()
        # Untied, because every update holds `lm_head.weight` explicitly: on CPU, a reload leaves a tied one stale.
        model = {**self._model_config, "tie_word_embeddings": False}
        (self._directory / "config.json").write_text(json.dumps(model))
        logging_config = {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"file": {"class": "logging.FileHandler", "filename": str(self._log)}},
            "loggers": {"vllm": {"handlers": ["file"], "level": "WARNING", "propagate": False}},
        }
        (self._directory / "logging.json").write_text(json.dumps(logging_config))
        # In this process the plug-in only registers. The variables of `_variables` are for the processes that vLLM
        # makes.
        plugins.load_general_plugins()
        self._handler = _LogFile(self._log)
        # The file may hold errors of an earlier life.
        self._log_start = self._log.stat().st_size

    def cancel(self) -> None:
        """Makes a running `start` fail, by killing the processes that it has made so far."""
        self._cancelled = True
        for core in self._cores:
            with contextlib.suppress(psutil.Error):
                core.kill()

    def _variables(self) -> dict[str, str]:
        variables = {
            vllm_plugin.PARENT_DEATH_VARIABLE: "1",
            vllm_plugin.LOG_VARIABLE: str(self._log),
            "VLLM_RPC_BASE_PATH": str(self._directory),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # The plug-in redirects output too late for vLLM's messages at import.
            "VLLM_CONFIGURE_LOGGING": "1",
            "VLLM_LOGGING_CONFIG_PATH": str(self._directory / "logging.json"),
        }
        if self._return_routing:
            # Of vLLM's own runners, only the newer one returns experts. It does not run on CPU.
            on_cpu = current_platform.is_cpu()
            variables[vllm_plugin.ROUTING_VARIABLE if on_cpu else "VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self._rollout.enforce_eager:
            # Without this, eager mode still compiles one comparison of the sampler with the C++ compiler: 16 s before
            # the first token.
            variables["TORCH_COMPILE_DISABLE"] = "1"
        if self._rollout.transport == "ipc":
            # CUDA handles are Python objects, which this process sends pickled.
            variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        if self._binding:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = self._binding
        if self._in_core and self._binding != "nobind":
            cores = cpu_resource_utils.parse_id_list(self._binding)
            # OpenMP's own variables bind threads that start later, too.
            places = f"{{{','.join(map(str, cores))}}}"
            variables |= {"OMP_NUM_THREADS": str(len(cores)), "OMP_PLACES": places, "OMP_PROC_BIND": "true"}
        if self._binding == "nobind" and "OMP_NUM_THREADS" not in os.environ:
            # One core is left to the core process and this one. OpenMP threads wait for each other at every kernel's
            # end, so a preempted thread costs far more than one thread fewer.
            variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
        return variables

    def _arguments(self) -> arg_utils.AsyncEngineArgs:
        rollout = self._rollout
        memory: dict[str, Any] = {"gpu_memory_utilization": rollout.gpu_memory_fraction}
        if current_platform.is_cpu():
            # The config gives the engine's total, and vLLM takes each worker's part.
            memory = {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30 / self._tensor_parallel)}
        options: dict[str, Any] = {}
        if self._lora.rank:
            # One adapter, that of the policy. Only its projections get vLLM's wrappers.
            options |= {
                "enable_lora": True,
                "max_loras": 1,
                # The smallest rank of vLLM's buffers that holds the adapter. vLLM fills up with zeros.
                "max_lora_rank": min(size for size in vllm_lora.RANKS if size >= self._lora.rank),
                "lora_target_modules": list(self._lora.targets),
            }
        if self._in_core:
            options["distributed_executor_backend"] = uniproc_executor.UniProcExecutor
        return arg_utils.AsyncEngineArgs(
            model=str(self._directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=rollout.dtype,
            seed=self._seed,
            max_model_len=rollout.max_context,
            max_num_seqs=rollout.slots,
            tensor_parallel_size=self._tensor_parallel,
            logprobs_mode=logprob_contract.LOGPROBS_MODE,
            stream_interval=rollout.stream_interval,
            enforce_eager=rollout.enforce_eager,
            weight_transfer_config={"backend": TRANSPORTS[rollout.transport]},
            disable_log_stats=True,
            enable_sleep_mode=self.sleeps,
            enable_return_routed_experts=self._return_routing,
            logging_config=vllm_logging.LoggingConfig(
                configure_logging=False, log_level="WARNING", pylogging_config_file=None
            ),
            **memory,
            **options,
            # The config has refused every argument that is set above.
            **rollout.engine_arguments,
        )

    def stop(self) -> None:
        """Ends and reaps every process in bounded time, with a kill if necessary, and removes its remains."""
        if self._ended:
            return
        self._ended = True
        if self._engine is not None:
            with contextlib.suppress(Exception):
                self._engine.shutdown(timeout=_TERMINATE_SECONDS)
            self._engine = None
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(self.processes, timeout=_TERMINATE_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_KILL_SECONDS)
        for segment in self.segments:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{segment}")
                if segment.startswith("psm_"):
                    # A killed process has not unregistered it at Python's tracker, which would complain at our exit.
                    resource_tracker.unregister(f"/{segment}", "shared_memory")
        if self._handler is not None:
            logger = logging.getLogger("vllm")
            logger.removeHandler(self._handler)
            # Silences the logger, unless another engine's handler remains.
            if not logger.handlers:
                logger.addHandler(logging.NullHandler())
            self._handler.close()
        if self._scratch is not None:
            self._scratch.close()

    def reason(self) -> str:
        """Returns the last error in the output of the engine's processes, on one line; empty if none exists."""
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[self._log_start :].decode(errors="replace")
            found = re.findall(r"^.*?((?:\w+\.)*\w*(?:Error|Exception): .+)$", text, re.MULTILINE)
            # These two only say that another process failed; the cause stands before them.
            causes = [line for line in found if not line.startswith("vllm.v1.engine.exceptions.EngineDeadError")]
            causes = [line for line in causes if "Engine core initialization failed" not in line]
            if causes:
                return " ".join(causes[-1].split())
        return ""


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, and restores them and vLLM's own afterwards.

    Other variables stay as they are, because another actor of this process may be starting with variables of its own.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in {*before, *os.environ}:
            if name not in variables and not name.startswith(_VLLM_SETS):
                continue
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


class _LogFile(logging.FileHandler):
    """Writes vLLM's warnings and errors in this process to a file instead of the terminal, until it is removed.

    Made on the thread that starts the engine. Leaves out records of other engines' starts.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._thread = threading.get_ident()
        logger = logging.getLogger("vllm")
        # Only other engines' files stay: vLLM's own handler writes to the terminal.
        logger.handlers = [handler for handler in logger.handlers if isinstance(handler, _LogFile)]
        logger.addHandler(self)
        logger.propagate = False
        logger.setLevel(logging.WARNING)

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True unless the record comes from a thread that starts another engine."""
        return record.thread == self._thread or not (record.threadName or "").startswith(_STARTER_NAME)
