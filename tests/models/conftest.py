"""Random models made by transformers: the reference that the decoder is held against."""

import pytest
import torch
import transformers

SHAPES = {
    "small": {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "large": {
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
}


def _make(architecture, tied, size, **fields):
    """A model in eval mode whose every parameter matters: no zero bias, no unit norm, logits of a few units."""
    values = SHAPES[size] | {"tie_word_embeddings": tied} | fields
    if architecture in ("qwen3", "qwen3_moe"):
        values.setdefault("head_dim", 16)  # not hidden_size / heads
    config = transformers.AutoConfig.for_model(architecture, **values)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="session")
def make_reference():
    """(architecture, tied, size, **config fields) -> a transformers model with random weights."""
    return _make
