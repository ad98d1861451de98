"""transformers' model as the reference for an engine's log-probs, and random weights under which tokens differ."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import torch

from gpu import timing
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.weights import snapshot

SHARPNESS = 4.0
"""Scale of the final norm. Random weights alone make all tokens nearly as probable, and errors invisible."""


@dataclass(frozen=True)
class Errors:
    """Differences between an engine's log-probs and the reference's, in nats.

    Attributes:
      mean: mean over tokens.
      largest: largest of a token.
      rounding: mean difference that transformers makes itself if it computes in the engine's dtype.
      tokens: compared tokens.
    """

    mean: float
    largest: float
    rounding: float
    tokens: int

    def figures(self) -> dict[str, float]:
        """Returns the figures of a row."""
        return {
            "log_prob_error": self.mean,
            "log_prob_error_max": self.largest,
            "transformers_rounding": self.rounding,
            "compared_tokens": float(self.tokens),
        }

    def problem(self, allowed: float) -> str:
        """Returns a sentence if the mean error exceeds what is allowed and what transformers' own dtype costs."""
        bound = max(allowed, 2 * self.rounding)
        return "" if self.mean <= bound else f"log-probs are off by {self.mean:.2g} nats, and {bound:.2g} is allowed"


def random_params(shape: model_config.TransformerConfig, seed: int) -> transformer.Params:
    """Returns random parameters whose tokens differ in probability; other seeds give other distributions."""
    params = transformer.init_params(shape, jax.random.key(seed))
    sharper = {"weight": params["norm"]["weight"] * SHARPNESS}
    return jax.block_until_ready({**params, "norm": sharper})


def prompts(shape: model_config.TransformerConfig, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Returns `count` prompts of `tokens` random tokens."""
    rng = random.Random(0)
    return [tuple(rng.randrange(shape.vocab_size) for _ in range(tokens)) for _ in range(count)]


def errors(
    shape: model_config.TransformerConfig,
    params: transformer.Params,
    dtype: str,
    asked: Sequence[tuple[int, ...]],
    outputs: Sequence[Sequence[protocols.TokenDelta]],
) -> Errors:
    """Compares the engine's log-probs with transformers' in float32, for weights rounded as they are sent.

    Args:
      shape: shape of the model.
      params: parameters in float32.
      dtype: dtype in which the engine computes.
      asked: prompts, all of one length.
      outputs: the engine's output to each prompt, all of one length.
    """
    sampled = [[token for delta in deltas for token in delta.token_ids] for deltas in outputs]
    engine = torch.tensor([[value for delta in deltas for value in delta.log_probs] for deltas in outputs])
    tokens = torch.tensor([[*prompt, *output] for prompt, output in zip(asked, sampled, strict=True)])
    place = timing.torch_device(jax.devices()[0])
    model, tokens = _model(shape, params, dtype, place), tokens.to(place)
    exact = _log_probs(model, tokens, engine.shape[1])
    rounded = exact if dtype == "float32" else _log_probs(model.to(getattr(torch, dtype)), tokens, engine.shape[1])
    difference = (engine - exact).abs()
    return Errors(
        float(difference.mean()), float(difference.max()), float((rounded - exact).abs().mean()), engine.numel()
    )


def _model(
    shape: model_config.TransformerConfig, params: transformer.Params, dtype: str, place: torch.device
) -> torch.nn.Module:
    """Returns transformers' model with the weights as they are sent, on the device `place`."""
    import transformers

    untied = dataclasses.replace(shape, tie_word_embeddings=False)
    description = transformers.AutoConfig.for_model(**model_config.to_hf(untied))
    # On the device, because drawing the first weights on the host takes longer than all that follows.
    with place:
        model = transformers.AutoModelForCausalLM.from_config(description, attn_implementation="eager").eval()
    state = {}
    for source in snapshot.wire_entries(shape):
        leaf = snapshot.leaf(params, source)
        tensor = snapshot.to_torch(leaf if source.layer is None else leaf[source.layer])
        wire = getattr(torch, snapshot.wire_dtype(source, dtype))
        state[source.hf_name] = tensor.to(wire).float()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def _log_probs(model: torch.nn.Module, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the log-probs of the last `count` tokens of each row, in float32 on the host."""
    logits = model(input_ids=tokens).logits[:, -count - 1 : -1].float()
    chosen = tokens[:, -count:, None]
    return torch.log_softmax(logits, dim=-1).gather(-1, chosen)[..., 0].cpu()
