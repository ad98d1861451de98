"""Speed of the training programs: `grad_step` as a run compiles it, and the loop over the vocabulary.

Letters: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gpu import rows, shapes, timing
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import reports
from libra_jax.data import packing
from libra_jax.data import sequences as sequences_lib
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware, memory
from libra_jax.training import learner as learner_lib
from libra_jax.training import logprobs, step
from libra_jax.training import state as state_lib
from libra_jax.weights import memfd

MARGIN = 1.4
"""Factor on the planner's estimate of memory, which compiled programs exceeded by 12% to 40%
(docs/results/compiled.md)."""

MOMENT_BYTES = 8
"""Bytes of a parameter's two moments of Adam, which `grad_step` does without."""

STEP_SECONDS = 10.0
"""Seconds after which no further step is timed."""

MOST_STEPS = 5
"""Largest number of timed steps."""

REFERENCE_TOKENS = 64
"""Tokens whose log-probabilities are compared with those of plain float32 products."""

HEAD_ERROR = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest allowed difference of a log-probability, in nats."""


DRY_MODEL = "Qwen3-0.6B"
SHORTEST = 8192
"""In a dry run every model takes rows of this length, and only the first takes longer ones: it is the same code."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of `grad_step` that decide its memory: the model's depth, and what the backward pass computes again."""

    layers: int
    remat: str


def grad_step(bench: rows.Bench, preset: str, tokens: int) -> rows.Outcome:
    """Measures the gradient of one packed row that a single sequence fills, through the learner's own programs.

    The model keeps as many layers as the memory holds.

    Args:
      bench: where it runs.
      preset: name of the model's shape.
      tokens: tokens of the row.
    """
    if bench.tiny and tokens > SHORTEST and preset != DRY_MODEL:
        raise rows.LeftOut(f"a dry run measures rows this long with {DRY_MODEL} alone")
    device, tokens = jax.devices(bench.platform)[0], shapes.tokens(bench, tokens)
    stats = device.memory_stats() if device.platform != "cpu" else None
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else memfd.available_bytes()
    tried = []
    for setting in _settings(bench, preset, tokens, free):
        shape = shapes.shape(bench, preset, setting.layers)
        made = learner_lib.Learner(_config(bench, preset, tokens, setting.remat), shape, [device])
        began = time.perf_counter()
        try:
            program = made.programs.program(step.POLICY, made.inputs.empty(step.POLICY, tokens))
            compiled = time.perf_counter() - began
            if _program_bytes(program) > free:
                tried.append(f"{setting.layers} layers with remat {setting.remat}")
                continue
            return _timed(bench, made, shape, tokens, setting, compiled)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            tried.append(f"{setting.layers} layers with remat {setting.remat}")
    raise protocols.LibraError(
        f"one layer at {tokens} tokens needs more than {free / 1e9:.1f} GB (tried {'; '.join(tried)})"
    )


def _settings(bench: rows.Bench, preset: str, tokens: int, free: int) -> Iterator[Setting]:
    """Yields settings from the fastest to the smallest, without those that the planner's formula finds too large."""
    whole = shapes.shape(bench, preset).num_layers
    settings = [
        (whole, "none"),
        (whole, "dots"),
        *((math.ceil(whole / parts), "full") for parts in (1, 2, 4, 8, whole)),
    ]
    for layers, remat in dict.fromkeys(settings):
        shape = shapes.shape(bench, preset, layers)
        estimate = memory.trainer_bytes(_config(bench, preset, tokens, remat), shape)
        estimate -= MOMENT_BYTES * model_config.parameter_count(shape)
        if MARGIN * estimate <= free or layers == 1:
            yield Setting(layers, remat)


def _config(bench: rows.Bench, preset: str, tokens: int, remat: str) -> config_lib.RunConfig:
    return config_lib.RunConfig(
        model=config_lib.ModelConfig(preset=preset, compute_dtype=shapes.dtype(bench), remat=remat),
        rollout=config_lib.RolloutConfig(max_context=tokens, max_tokens=tokens // 2),
        trainer=config_lib.TrainerConfig(row_tokens=tokens, rows_per_micro_batch=1),
    )


def _program_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    fresh = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + fresh)


def _timed(
    bench: rows.Bench,
    made: learner_lib.Learner,
    shape: model_config.TransformerConfig,
    tokens: int,
    setting: Setting,
    compiled: float,
) -> rows.Outcome:
    params = state_lib.random_params(shape, made.layout, seed=0)
    batch = made.programs.put(_micro_batch(made, shape.vocab_size, tokens))
    sums = made.programs.zeros()
    took: list[float] = []
    while len(took) < 2 or (len(took) <= MOST_STEPS and sum(took[1:]) < STEP_SECONDS):
        began = time.perf_counter()
        sums, _ = jax.block_until_ready(made.programs.grad_step(step.POLICY, params, sums, batch))
        took.append(time.perf_counter() - began)
    seconds = sorted(took[1:])[len(took[1:]) // 2]  # the first warms up
    if bench.traces:
        with jax.profiler.trace(f"{bench.traces}/{made.config.model.preset}-{tokens}"):
            sums, _ = jax.block_until_ready(made.programs.grad_step(step.POLICY, params, sums, batch))
    flops = costs.train_flops(shape, model_config.multiplied_parameter_count(shape), [tokens])
    known = hardware.peak_flops(jax.devices(bench.platform)[0].device_kind)
    counted = {"tokens/processed": float(tokens), "train/devices": 1.0, "train/flops": flops}
    speed = reports.training_speed(counted, seconds, known)
    products = timing.matmul_flops(shapes.dtype(bench), 512 if bench.tiny else 8192)
    whole = shapes.shape(bench, made.config.model.preset).num_layers
    figures: dict[str, rows.Value] = {
        "tokens": tokens,
        "layers": f"{setting.layers} of {whole}",
        "parameters": model_config.parameter_count(shape),
        "remat": setting.remat,
        "compile_seconds": compiled,
        "program_gigabytes": _program_bytes(made.programs.program(step.POLICY, batch)) / 1e9,
        "seconds": seconds,
        "tokens_per_second": speed["train/tokens_per_second"],
        "teraflops_per_second": flops / seconds / 1e12,
        "share_of_matmul": flops / seconds / products,
    }
    if "train/mfu" in speed:
        figures["mfu"] = speed["train/mfu"]
    squares = sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(sums.gradients))
    finite = bool(jnp.isfinite(sums.loss)) and bool(jnp.isfinite(squares)) and bool(squares > 0)
    return rows.Outcome(figures, "" if finite else f"loss {float(sums.loss)}, squared gradient norm {float(squares)}")


def _micro_batch(made: learner_lib.Learner, vocabulary: int, tokens: int) -> dict[str, np.ndarray]:
    """Returns a row that one sequence of random tokens fills, with random advantages."""
    rng = np.random.default_rng(0)
    count = tokens + 1  # the last is only predicted
    example = sequences_lib.Example(
        sequence_id="random",
        tokens_N=rng.integers(0, vocabulary, count).astype(np.int32),
        mask_N=np.arange(count) > 0,
        behaviour_N=np.full(count, -math.log(vocabulary), np.float32),
        on_version_N=np.ones(count, bool),
    )
    packed = packing.pack([example], made.config.trainer)
    advantages = packed.scatter([rng.standard_normal(count).astype(np.float32)])[0]
    batch = made.inputs.empty(step.POLICY, tokens)
    return batch | made.inputs.arrays(packed, 0, {"advantages": advantages})


def vocabulary(bench: rows.Bench, chunk: int) -> rows.Outcome:
    """Measures log-probabilities and their gradients with the vocabulary and the width of Qwen3-1.7B.

    Four products of 2 T D V operations run: the logits twice, and the gradients of hidden states and projection.

    Args:
      bench: where it runs.
      chunk: tokens whose logits exist at once.
    """
    shape, dtype = shapes.shape(bench, "Qwen3-1.7B"), shapes.dtype(bench)
    tokens, chunk = shapes.tokens(bench, 16_384), shapes.tokens(bench, chunk)
    keys = jax.random.split(jax.random.key(0), 4)
    hidden_1xTxD = jax.random.normal(keys[0], (1, tokens, shape.hidden_size), dtype)
    head_DxV = jax.random.normal(keys[1], (shape.hidden_size, shape.vocab_size)) * shape.hidden_size**-0.5
    targets_1xT = jax.random.randint(keys[2], (1, tokens), 0, shape.vocab_size)
    weights_1xT = jax.random.normal(keys[3], (1, tokens))

    def loss(hidden_1xTxD: jax.Array, head_DxV: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_probs_1xT, _ = logprobs.token_log_probs(hidden_1xTxD, head_DxV, targets_1xT, temperature=1.0, chunk=chunk)
        return jnp.sum(weights_1xT * log_probs_1xT), log_probs_1xT

    program = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    _, log_probs_1xT = program(hidden_1xTxD, head_DxV)
    seconds = statistics.median(timing.seconds(lambda: program(hidden_1xTxD, head_DxV)))
    some = slice(0, REFERENCE_TOKENS)
    with jax.default_matmul_precision("highest"):
        logits = hidden_1xTxD[0, some].astype(jnp.float32) @ head_DxV
    exact = jnp.take_along_axis(jax.nn.log_softmax(logits), targets_1xT[0, some, None], axis=1)[:, 0]
    error = float(jnp.max(jnp.abs(log_probs_1xT[0, some] - exact)))
    flops = 8.0 * tokens * shape.hidden_size * shape.vocab_size
    figures: dict[str, rows.Value] = {
        "tokens": tokens,
        "chunk": chunk,
        "width": shape.hidden_size,
        "vocabulary": shape.vocab_size,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "share_of_matmul": flops / seconds / timing.matmul_flops(dtype, 512 if bench.tiny else 8192),
        "log_prob_error": error,
    }
    if (peak := hardware.peak_flops(jax.devices(bench.platform)[0].device_kind)) is not None:
        figures["share_of_peak"] = flops / seconds / peak
    bound = HEAD_ERROR[dtype]
    problem = "" if error <= bound else f"a log-probability is off by {error:.2g} nats, and {bound:g} is allowed"
    return rows.Outcome(figures, problem)
