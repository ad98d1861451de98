"""Gates on the training programs that XLA compiles for H100 and TPU v6e, without one.

Every limit is a ratio to the least possible (`models.communication_bounds`, `costs.train_flops`), so it
holds for any size. Without
`--accelerators` all are left out; `--accelerators=h100` runs the first one.
"""

import dataclasses
import json

import pytest

from libra_jax.models import communication_bounds
from libra_jax.models import config as model_config
from libra_jax.planning.compiled import programs
from libra_jax.planning.costs import costs, hardware

WIRE_BYTES = 1.25
FLOPS = 1.15


@dataclasses.dataclass(frozen=True)
class Gate:
    """A case: what is compiled, by its settings beyond compiled_config.py."""

    target: str
    model: str
    mesh: tuple[int, int, int]
    rows: int
    row_tokens: int = 8192
    remat: str = "dots"
    context: int = 1

    def __str__(self) -> str:
        mesh = "x".join(map(str, (*self.mesh, self.context)))
        return f"{self.target}-{self.model}-{mesh}-{self.row_tokens}-{self.remat}"

    def shape(self) -> model_config.TransformerConfig:
        if self.model != "narrow-32B":
            return model_config.load_preset(self.model)
        # Qwen3-32B has 64 layers of width 5120: as deep, a quarter as wide.
        values = model_config.to_hf(model_config.load_preset("Qwen3-8B")) | {
            "num_hidden_layers": 64,
            "hidden_size": 1280,
            "intermediate_size": 6400,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
        return model_config.from_hf(values)

    def settings(self, folder) -> dict[str, object]:
        (folder / "config.json").write_text(json.dumps(model_config.to_hf(self.shape())))
        data, fsdp, tensor = self.mesh
        return {
            "model.path": folder,
            "model.remat": self.remat,
            "trainer.data": data,
            "trainer.fsdp": fsdp,
            "trainer.tensor": tensor,
            "trainer.context": self.context,
            "trainer.rows_per_micro_batch": self.rows,
            "trainer.row_tokens": self.row_tokens,
            "rollout.max_context": self.row_tokens,
        }


GATES = [
    pytest.param(Gate("h100", "Qwen3-1.7B", (1, 8, 1), 8), marks=pytest.mark.accelerators("quick")),
    *[
        pytest.param(gate, marks=pytest.mark.accelerators)
        for gate in (
            Gate("h100", "Qwen3-1.7B", (1, 4, 2), 8),
            Gate("h100", "Qwen3-1.7B", (2, 8, 1), 16),  # two hosts
            Gate("h100", "Qwen3-8B", (1, 8, 1), 8, 32_768, "full"),
            Gate("h100", "Qwen3-8B", (1, 1, 1), 1, 131_072, "full", context=8),
            Gate("h100", "Qwen3-8B", (2, 4, 2), 8),  # two hosts
            Gate("h100", "narrow-32B", (1, 2, 8), 2),  # two hosts
            Gate("h100", "Qwen3-30B-A3B", (1, 16, 1), 16, remat="full"),  # two hosts, 8 experts a device
            Gate("v6e", "Qwen3-1.7B", (1, 8, 1), 8),
            Gate("v6e", "Qwen3-1.7B", (1, 4, 2), 8),
        )
    ],
]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_compiled_programs_do_little_more_than_they_must(gate, compiled, tmp_path):
    case, shape = compiled(gate.target, gate.settings(tmp_path)), gate.shape()
    gradient, foreseen = case.gradient, programs.expected(case, shape)
    faults = []
    wire = gradient.wire_bytes / communication_bounds.volumes(shape, *case.mesh, case.columns, case.context).total
    if wire > WIRE_BYTES:
        faults.append(f"wire bytes are {wire:.2f} x the least possible, not at most {WIRE_BYTES}")
    flops = foreseen.executed_flops / (foreseen.model_flops + foreseen.recomputed_flops)
    if flops > FLOPS:
        faults.append(f"FLOPs are {flops:.2f} x those of the model and its rematerialisation, not at most {FLOPS}")
    room = hardware.sheet(gate.target).memory_bytes * costs.Coefficients().memory_fraction
    if case.memory_bytes > room:
        faults.append(f"{case.memory_bytes / 1e9:.1f} GB of {room / 1e9:.1f} are needed")
    passes = (2 if gate.remat == "full" else 1) * shape.num_layers, shape.num_layers
    if (gradient.attention_forward, gradient.attention_backward) != passes:
        fused = f"{gradient.attention_forward:.0f} and {gradient.attention_backward:.0f}"
        faults.append(f"fused attention runs {fused} times forward and backward, not {passes[0]} and {passes[1]}")
    for program in case.programs.values():
        faults += [f"in the vocabulary loop: {item}" for item in program.vocabulary_collectives]
        faults += [f"logits of all tokens: {item}" for item in program.vocabulary_arrays]
    assert not faults, "\n".join(faults)
    assert case.programs["score"].attention_forward == shape.num_layers
