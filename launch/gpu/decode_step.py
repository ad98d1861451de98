"""Time of the matrix products of a decode step, as an engine runs them: in a CUDA graph, each degree's part of a model.

What the cost model (`planning/costs/costs.py`) needs of a GPU: the share of the bandwidth that weights are read with,
and what each layer adds at any degree. Attention and all-reduces are left out, which depend on contexts and on links.

Letters: N decoding sequences, D model width.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from gpu import rows, shapes
from libra_jax.models import config as model_config
from libra_jax.planning.costs import hardware

DEGREES = (1, 2, 4, 8)
SEQUENCES = (1, 16, 64, 256)

STEPS = 20
"""Timed steps, of which the fastest counts."""


def measure(bench: rows.Bench, preset: str) -> rows.Outcome:
    """Measures a step of each tensor-parallel degree's part of a model, for several numbers of sequences.

    Args:
      bench: where it runs.
      preset: name of the model's shape.
    """
    shape = shapes.shape(bench, preset)
    figures: dict[str, rows.Value] = {"layers": shape.num_layers}
    alone: dict[int, tuple[float, float]] = {}  # by degree: bytes of the weights, seconds of one sequence
    with torch.inference_mode():
        for degree in DEGREES:
            if shape.num_kv_heads % degree:
                continue
            weights = _Weights(bench, shape, degree)
            for count in SEQUENCES[:2] if bench.tiny else SEQUENCES:
                seconds = _seconds(bench, weights.step(count))
                figures[f"degree_{degree}_sequences_{count}_milliseconds"] = 1e3 * seconds
                if count == 1:
                    alone[degree] = weights.bytes, seconds
            del weights
            gc.collect()
            if not bench.tiny:
                torch.cuda.empty_cache()
    sizes, taken = np.array(list(alone.values())).T
    per_byte, fixed = np.polyfit(sizes, taken, 1)
    figures["layer_microseconds"] = 1e6 * float(fixed) / shape.num_layers
    figures["gigabytes_per_second"] = 1e-9 / float(per_byte)
    if not bench.tiny:
        name = hardware.DEVICE_KINDS.get(torch.cuda.get_device_name())
        if name is not None:
            figures["memory_share"] = 1 / float(per_byte) / hardware.sheet(name).memory_bytes_per_second
    return rows.Outcome(figures)


class _Weights:
    """One device's part of the weights that a step reads."""

    def __init__(self, bench: rows.Bench, shape: model_config.TransformerConfig, degree: int) -> None:
        self._device = torch.device("cpu" if bench.tiny else "cuda")
        self._dtype = getattr(torch, shapes.dtype(bench))
        self._hidden = shape.hidden_size
        heads = shape.num_heads * shape.head_dim // degree
        both = heads + 2 * shape.num_kv_heads * shape.head_dim // degree
        inner = shape.intermediate_size // degree
        self._heads = heads
        sizes = ((both, self._hidden), (self._hidden, heads), (2 * inner, self._hidden), (self._hidden, inner))
        # Every layer has weights of its own, which no cache of the device holds over a step.
        self._layers = [[self._random(*size) for size in sizes] for _ in range(shape.num_layers)]
        self._norm = torch.ones(self._hidden, device=self._device, dtype=self._dtype)
        self._head = self._random(shape.vocab_size // degree, self._hidden)
        everything = [self._head, *(matrix for layer in self._layers for matrix in layer)]
        self.bytes = float(sum(matrix.numel() * matrix.element_size() for matrix in everything))

    def step(self, count: int) -> Callable[[], torch.Tensor]:
        """Returns the step of `count` sequences."""
        x_NxD = self._random(count, self._hidden)

        def run() -> torch.Tensor:
            stream_NxD = x_NxD
            for together, out, gate_up, down in self._layers:
                normed = functional.rms_norm(stream_NxD, (self._hidden,), self._norm)
                # The queries stand for what attention makes of them.
                stream_NxD = stream_NxD + functional.linear(functional.linear(normed, together)[:, : self._heads], out)
                normed = functional.rms_norm(stream_NxD, (self._hidden,), self._norm)
                gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
                stream_NxD = stream_NxD + functional.linear(functional.silu(gate) * up, down)
            return functional.linear(stream_NxD, self._head)

        return run

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self._device, dtype=self._dtype) / sizes[-1] ** 0.5


def _seconds(bench: rows.Bench, step: Callable[[], torch.Tensor]) -> float:
    """Returns the seconds of the fastest step, replayed as a graph on a GPU."""
    run: Callable[[], object] = step
    if not bench.tiny:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries choose their kernels before the graph is captured
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    found = []
    for _ in range(3 if bench.tiny else STEPS):
        if not bench.tiny:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if not bench.tiny:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
