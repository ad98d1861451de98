"""The cost model against decode steps, all-reduces and prefills that others measured on real accelerators."""

from __future__ import annotations

import pytest

from libra_jax.models import config as model_config
from libra_jax.planning.costs import costs, hardware
from tests.benchmarks import machines


def test_decode_steps_on_a100s_are_within_a_fifth_on_average_and_unbiased():
    found = [step for step in machines.steps() if step.accelerator == "a100"]
    assert len(found) >= 30
    assert {step.degree for step in found} == {1, 2, 4, 8}
    error, bias = machines.errors(found)
    assert error < 0.2
    assert abs(bias) < 0.05


def test_decode_steps_on_h100s_are_within_an_eighth_on_average():
    error, bias = machines.errors([step for step in machines.steps() if step.accelerator == "h100"])
    assert error < 0.125
    assert abs(bias) < 0.05


@pytest.mark.parametrize(("degree", "milliseconds"), {1: 11.2, 2: 6.31, 4: 3.73, 8: 2.54}.items())
def test_a_step_on_an_h100_takes_the_products_that_were_measured_and_little_more(degree, milliseconds):
    """Measured: matrix products, norms and activations of one sequence in a CUDA graph (docs/results/machines.md)."""
    model = machines.cost_model("h100", "Qwen3-14B")
    step = 1e3 * (model.fixed_seconds(degree, 1) - model.collective_seconds(degree, 1))
    assert milliseconds < step < 1.4 * milliseconds


@pytest.mark.parametrize("lengths", machines.CONTRAST)
def test_degrees_differ_as_published_for_short_and_long_outputs(lengths):
    _, _, _, published_narrow, published_wide = machines.CONTRAST[lengths]
    narrow, wide = machines.contrast(lengths)
    assert wide / narrow == pytest.approx(published_wide / published_narrow, rel=0.25)


ALL_REDUCES = {
    # (accelerator, devices): microseconds of 16, 128 and 512 KiB and 2 MiB, vLLM's kernels in a CUDA graph
    # (ai-dynamo/aiconfigurator, systems/data/*/custom_allreduce; 8 KiB stands for 16 on H100s)
    ("a100", 2): (5.2, 6.6, 10.7, 25.2),
    ("a100", 4): (6.0, 9.9, 18.3, 41.5),
    ("a100", 8): (6.9, 17.1, 21.7, 45.4),
    ("h100", 2): (4.5, 5.2, 8.3, 20.2),
    ("h100", 4): (4.8, 7.2, 12.8, 30.2),
    ("h100", 8): (5.3, 10.8, 15.0, 30.8),
}


@pytest.mark.parametrize(("accelerator", "devices"), ALL_REDUCES)
def test_all_reduces_take_what_was_measured(accelerator, devices):
    model = costs.CostModel(hardware.sheet(accelerator), model_config.load_preset("Qwen3-14B"))
    for kib, measured in zip((16, 128, 512, 2048), ALL_REDUCES[accelerator, devices], strict=True):
        tokens = kib * 1024 / (2 * model.shape.hidden_size)
        each = model.collective_seconds(devices, tokens) / (2 * model.shape.num_layers)
        assert 1e6 * each == pytest.approx(measured, rel=0.4)


PREFILLS = [
    # model, degree, tokens of the prompt, tokens a second on A100s, source
    ("Llama-3-70B", 4, 2048, 5_090),  # Llama-2-70B in InternLM/lmdeploy docs/en/benchmark/a100_fp16.md
    ("Llama-3-70B", 4, 2048, 5_430),  # in TensorRT-LLM docs/source/performance.md, v0.5
    ("Mistral-7B", 1, 2048, 14_700),  # Llama-2-7B in lmdeploy's table
    ("Mistral-7B", 1, 2048, 15_400),  # LLaMA-7B in TensorRT-LLM's table
    ("Qwen3-14B", 1, 2000, 5_967),  # gpustack docs/performance-lab/qwen3-14b/a100.md, vLLM 0.11, decoding included
]


@pytest.mark.parametrize(("model", "degree", "tokens", "rate"), PREFILLS)
def test_prefill_rates_are_those_measured(model, degree, tokens, rate):
    seconds = machines.cost_model("a100", model).prefill_seconds(degree, tokens)
    assert tokens / seconds == pytest.approx(rate, rel=0.25)
