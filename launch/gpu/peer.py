"""Speed of another implementation on the same work: transformers' model in torch, as peers of this framework train it.

It is given what makes it fast: weights and gradients in bfloat16 alone, cuDNN's or the flash attention kernel, compiled
layers, logits of a few thousand tokens at once, and no layer computed again where the memory holds all.

Letters: T tokens, D model width.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn import attention

from gpu import rows, shapes
from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware

CHUNK = 4096
"""Tokens whose logits exist at once."""

WARM_UP = 2
"""Steps before the first timed one."""

STEPS = 5
"""Timed steps."""

CLIP = 0.2
"""Bound of the ratio, as in PPO's clipped objective."""


def grad_step(bench: rows.Bench, preset: str, tokens: int) -> rows.Outcome:
    """Measures the gradient of one row that a single sequence fills, through transformers' model of a preset's shape.

    Args:
      bench: where it runs.
      preset: name of the model's shape.
      tokens: tokens of the row.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        raise rows.LeftOut("transformers is not installed") from None
    shape, tokens = shapes.shape(bench, preset), shapes.tokens(bench, tokens)
    seconds, recomputes, norm = 0.0, False, 0.0
    for recomputes in (False, True):
        try:
            seconds, norm = _timed(bench, shape, tokens, recomputes)
            break
        except torch.cuda.OutOfMemoryError:
            if recomputes:
                raise
        # Out of the handler, whose traceback holds the tensors.
        gc.collect()
        torch.cuda.empty_cache()
    flops = costs.train_flops(shape, model_config.multiplied_parameter_count(shape), [tokens])
    figures: dict[str, rows.Value] = {
        "tokens": tokens,
        "layers": shape.num_layers,
        "recomputes_layers": "yes" if recomputes else "no",
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "teraflops_per_second": flops / seconds / 1e12,
    }
    if not bench.tiny:
        figures["peak_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
        if (peak := hardware.peak_flops(torch.cuda.get_device_name())) is not None:
            figures["mfu"] = flops / seconds / peak
    finite = 0.0 < norm < float("inf")
    return rows.Outcome(figures, "" if finite else f"the gradient of the vocabulary's projection has norm {norm}")


def _timed(
    bench: rows.Bench, shape: model_config.TransformerConfig, tokens: int, recomputes: bool
) -> tuple[float, float]:
    """Returns the median seconds of a step, and the norm of one gradient."""
    device = torch.device("cpu" if bench.tiny else "cuda")
    model = _model(bench, shape, device, recomputes)
    generator = torch.Generator(device).manual_seed(0)
    ids_1xT = torch.randint(0, shape.vocab_size, (1, tokens + 1), generator=generator, device=device)
    advantages_T = torch.randn(tokens, generator=generator, device=device)
    kernels = [attention.SDPBackend.CUDNN_ATTENTION, attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.MATH]
    took = []
    # Around the backward pass, too, which computes layers again.
    with attention.sdpa_kernel(kernels, set_priority=True):
        for _ in range(WARM_UP + STEPS):
            began = time.perf_counter()
            model.zero_grad(set_to_none=False)  # sums of gradients stay, as over micro-batches
            _loss(model, ids_1xT, advantages_T).backward()
            if not bench.tiny:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
    head = model.get_output_embeddings().weight
    return statistics.median(took[WARM_UP:]), float(head.grad.norm())


def _model(bench: rows.Bench, shape: model_config.TransformerConfig, device: torch.device, recomputes: bool) -> Any:
    import transformers

    dtype = shapes.dtype(bench)
    values = model_config.to_hf(shape, dtype)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    model.train()
    model.config.use_cache = False
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # The CPU's compiler needs a C++ compiler, which a dry run should not ask for.
    if not bench.tiny:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def _loss(model: Any, ids_1xT: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """Returns PPO's clipped objective with a behaviour policy that is uniform over the vocabulary."""
    hidden_TxD = model.model(input_ids=ids_1xT[:, :-1]).last_hidden_state[0]
    head, parts = model.get_output_embeddings().weight, []
    behaviour = -float(torch.log(torch.tensor(float(len(head)))))
    part = functools.partial(_part, behaviour=behaviour)
    for first in range(0, len(hidden_TxD), CHUNK):
        some = slice(first, first + CHUNK)
        arguments = (hidden_TxD[some], head, ids_1xT[0, 1:][some], advantages_T[some])
        parts.append(torch.utils.checkpoint.checkpoint(part, *arguments, use_reentrant=False))
    return torch.stack(parts).sum()


def _part(
    hidden_TxD: torch.Tensor, head: torch.Tensor, targets_T: torch.Tensor, advantages_T: torch.Tensor, behaviour: float
) -> torch.Tensor:
    logits = (hidden_TxD @ head.T).float()
    log_probs_T = -torch.nn.functional.cross_entropy(logits, targets_T, reduction="none")
    ratio_T = torch.exp(log_probs_T - behaviour)
    bounded_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T).sum()
