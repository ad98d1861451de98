"""The cost model beside published decode steps of real engines (`published_steps.csv`), and what it says of degrees.

A row of the file is one decode step: accelerator, model, tensor-parallel degree, decoding sequences, mean context of a
sequence, milliseconds, engine, source. Models are dense, in 16 bits.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import statistics
from dataclasses import dataclass
from typing import Any

from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware

FILE = pathlib.Path(__file__).with_name("published_steps.csv")

SHAPES = {
    # name: (layers, hidden, intermediate, heads, key-value heads, head dim, vocabulary, tied embeddings)
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 128, 151_936, True),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, 128, 152_064, False),
    "Qwen2.5-32B": (64, 5120, 27648, 40, 8, 128, 152_064, False),
    "Qwen2.5-72B": (80, 8192, 29568, 64, 8, 128, 152_064, False),
    "Mistral-7B": (32, 4096, 14336, 32, 8, 128, 32_768, False),
    "Mistral-Nemo-12B": (40, 5120, 14336, 32, 8, 128, 131_072, False),
    "Llama-3-70B": (80, 8192, 28672, 64, 8, 128, 128_256, False),
}
"""Shapes, from the models' config.json, of models that have no preset. QwQ-32B has the shape of Qwen2.5-32B."""

CONTRAST = {
    # lengths: (sequences of eight instances of degree 1, of one of degree 8, context, published tokens/s of each)
    "0-2k": (40, 5, 1_000, 1_852, 591),
    "16-32k": (12, 12, 20_000, 430, 1_220),
}
"""Tokens a second of eight A800s as instances of degree 1 or as one of degree 8, by output length, with Qwen3-14B
(arXiv 2606.03077). The loads are not published. They are inferred: each published rate asks for about that many busy
sequences, so equal numbers an instance for short outputs, and equal numbers in all for long ones."""


@dataclass(frozen=True)
class Step:
    """A published step, and the cost model's."""

    accelerator: str
    model: str
    degree: int
    sequences: int
    context: int
    milliseconds: float
    engine: str
    source: str
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the cost model."""
        return self.predicted / self.milliseconds - 1.0


def steps(coefficients: costs.Coefficients | None = None) -> list[Step]:
    """Returns all published steps."""
    found = []
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            degree, sequences, context = (int(row[name]) for name in ("degree", "sequences", "context"))
            model = cost_model(row["accelerator"], row["model"], coefficients)
            seconds = model.step_seconds(degree, sequences, sequences * context)
            whole = {**row, "degree": degree, "sequences": sequences, "context": context}
            found.append(Step(**{**whole, "milliseconds": float(row["milliseconds"])}, predicted=1e3 * seconds))  # type: ignore[arg-type]
    return found


def cost_model(accelerator: str, model: str, coefficients: costs.Coefficients | None = None) -> costs.CostModel:
    """Returns the costs of a model by its preset, or by `SHAPES`."""
    return costs.CostModel(hardware.sheet(accelerator), shape(model), coefficients or costs.Coefficients())


def shape(model: str) -> model_config.TransformerConfig:
    """Returns the shape of a model."""
    if model not in SHAPES:
        return model_config.load_preset(model)
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[model]
    return dataclasses.replace(
        model_config.load_preset("Llama-3.1-8B"),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def errors(found: list[Step]) -> tuple[float, float]:
    """Returns the mean absolute relative error, and the mean relative error."""
    return statistics.fmean(abs(step.error) for step in found), statistics.fmean(step.error for step in found)


def contrast(lengths: str, coefficients: costs.Coefficients | None = None) -> tuple[float, float]:
    """Returns tokens a second of eight A800s at these output lengths: as eight instances, and as one."""
    narrow, wide, context, _, _ = CONTRAST[lengths]
    model = cost_model("a800", "Qwen3-14B", coefficients)
    each = narrow / 8
    # The mean number of sequences need not be whole; between whole ones a step's time is nearly linear.
    below = max(1, int(each))
    seconds = [model.step_seconds(1, count, count * context) for count in (below, below + 1)]
    return narrow / (seconds[0] + (each - below) * (seconds[1] - seconds[0])), wide / model.step_seconds(
        8, wide, wide * context
    )


def _ratio(lengths: str, coefficients: costs.Coefficients) -> float:
    narrow, wide = contrast(lengths, coefficients)
    return wide / narrow


def measure() -> dict[str, Any]:
    """Prints each published step beside the predicted one, and the effect of each coefficient moved by 30%.

    Returns:
      Errors by accelerator, and the contrast of degrees.
    """
    found = steps()
    for step in found:
        print(
            f"{step.accelerator:5} {step.model:17} degree {step.degree}, {step.sequences:3} sequences of "
            f"{step.context:5,}: {step.milliseconds:5.1f} ms published, {step.predicted:5.1f} predicted "
            f"({100 * step.error:+.0f}%)  {step.engine}; {step.source}"
        )
    report: dict[str, Any] = {}
    for accelerator in dict.fromkeys(step.accelerator for step in found):
        error, bias = errors([step for step in found if step.accelerator == accelerator])
        report |= {f"{accelerator}_error": error, f"{accelerator}_bias": bias}
    for lengths in CONTRAST:
        narrow, wide = contrast(lengths)
        report |= {f"wide_over_narrow_{lengths}": wide / narrow}
        report |= {f"narrow_tokens_{lengths}": narrow, f"wide_tokens_{lengths}": wide}
    for name, value in costs.moved(costs.Coefficients(), 0.3):
        if name in DECODING:
            other = dataclasses.replace(costs.Coefficients(), **{name: value})  # type: ignore[arg-type]
            error, bias = errors([step for step in steps(other) if step.accelerator == "a100"])
            ratios = [f"{lengths} {_ratio(lengths, other):.2f}" for lengths in CONTRAST]
            print(
                f"{name} = {value:.3g}: A100 error {error:.1%}, bias {bias:+.1%}; wide over narrow {', '.join(ratios)}"
            )
    return report


DECODING = (
    "memory_share",
    "context_share",
    "rollout_flops_share",
    "step_overhead",
    "layer_overhead",
    "sequence_overhead",
    "collective_latency",
    "one_shot_share",
    "two_shot_latency",
    "two_shot_share",
)
"""Coefficients that a decode step depends on."""
