"""Rollouts of several segments, and a plain float64 reference of their loss: one row a segment, its context in full."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from libra_jax import protocols
from libra_jax.models import config as model_config

PROMPT, TOOL = protocols.TokenSource.PROMPT, protocols.TokenSource.TOOL


class Script:
    """Writes a rollout token by token, with random tokens, log-probabilities, versions and experts."""

    def __init__(self, seed: int, name: str, reward: float, vocabulary: int = 16, experts: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.rollout = protocols.Trajectory(name, name.split("/")[0], reward=reward)
        self.vocabulary, self.experts = vocabulary, experts

    def text(self, segment: protocols.Segment, count: int, source: protocols.TokenSource = PROMPT) -> None:
        segment.append_text(self.rng.integers(0, self.vocabulary, count).tolist(), source)

    def output(self, segment: protocols.Segment, count: int) -> None:
        tokens = tuple(self.rng.integers(0, self.vocabulary, count).tolist())
        log_probs = tuple(self.rng.normal(-np.log(self.vocabulary), 0.15, count).tolist())
        versions = tuple(self.rng.integers(0, 2, count).tolist())
        routing: tuple[bytes, ...] = ()
        if self.experts:
            # Of all tokens but the last, as an engine reports them: those of the context first.
            known = len(segment.token_ids) + count - 1 - len(segment.routing)
            routing = tuple(
                np.argsort(self.rng.random((2, self.experts)))[:, :2].astype(np.uint8).tobytes() for _ in range(known)
            )
        segment.append_sampled(protocols.TokenDelta(tokens, log_probs, versions, "stop", routing))

    def branch(self, parent: protocols.Segment | None, shared: int) -> protocols.Segment:
        return self.rollout.branch(parent, shared)


def scripted(seed: int, name: str, reward: float, experts: int = 0) -> protocols.Trajectory:
    """An agent that summarises its history twice, spawns two children, one of them with a child of its own, and asks a
    judge that sees nothing of it. The forks are in the middle of parents that go on afterwards; one is at an end.
    """
    script = Script(seed, name, reward, experts=experts)
    root = script.rollout
    script.text(root, 6)
    script.output(root, 4)
    script.text(root, 3, TOOL)
    script.output(root, 2)
    fork = root.context_tokens
    script.text(root, 2, TOOL)
    script.output(root, 3)
    child = script.branch(root, fork)
    script.text(child, 3)
    script.output(child, 4)
    inner = script.branch(child, child.context_tokens - 2)
    script.text(inner, 2)
    script.output(inner, 3)
    script.text(child, 2, TOOL)
    script.output(child, 2)
    first = script.branch(root, 3)
    script.text(first, 4)
    script.output(first, 5)
    second = script.branch(first, 3)  # of the root's beginning, which the first summary shares, too
    script.text(second, 5)
    script.output(second, 2)
    other = script.branch(second, second.context_tokens)
    script.text(other, 2)
    script.output(other, 2)
    judge = script.branch(None, 0)
    script.text(judge, 3)
    script.output(judge, 2)
    return root


def plain(seed: int, name: str, reward: float, experts: int = 0) -> protocols.Trajectory:
    """A rollout of one segment."""
    script = Script(seed, name, reward, experts=experts)
    script.text(script.rollout, 4)
    script.output(script.rollout, 3 + seed % 5)
    script.text(script.rollout, 2, TOOL)
    script.output(script.rollout, 3)
    return script.rollout


def random_rollout(rng: np.random.Generator, segments: int, name: str = "p/0") -> protocols.Trajectory:
    """A rollout whose segments fork anywhere; some have no output, and some share nothing."""
    script = Script(int(rng.integers(1 << 30)), name, 1.0)
    for number in range(segments):
        segment: protocols.Segment = script.rollout
        if number:
            parent = script.rollout.segments[int(rng.integers(number))]
            alone = rng.random() < 0.15 or not parent.context_tokens
            segment = script.branch(None if alone else parent, int(rng.integers(1, max(1, parent.context_tokens) + 1)))
        for _ in range(int(rng.integers(1, 4))):
            script.text(segment, int(rng.integers(0, 4)))
            script.output(segment, int(rng.integers(0, 5)))
    return script.rollout


def batch(trajectories: list[protocols.Trajectory], version: int = 1) -> protocols.TrainBatch:
    """A batch whose groups are the rollouts of one prompt."""
    groups: dict[str, list[protocols.Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.prompt_id, []).append(trajectory)
    made = [
        protocols.Group(number, protocols.Task(prompt, {}), version, members)
        for number, (prompt, members) in enumerate(groups.items())
    ]
    return protocols.TrainBatch(version, tuple(made))


def routed(segment: protocols.Segment) -> list[bytes]:
    """The experts of a context's first tokens."""
    before = routed(segment.parent)[: segment.shared] if segment.parent is not None else []
    return [*before, *segment.routing]


# --------------------------------------------------------------------------------------------------------------------
# The reference, in float64. It shares no code with the trainer's programs.
# --------------------------------------------------------------------------------------------------------------------


def _norm(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotated(x_TxHxK, theta):
    tokens, _, width = x_TxHxK.shape
    angles = jnp.arange(tokens)[:, None] / theta ** (jnp.arange(0, width, 2) / width)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    low, high = x_TxHxK[..., : width // 2], x_TxHxK[..., width // 2 :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _feed_forward(x_TxD, layer, shape, experts_TxK):
    def silu(gate, up):
        return gate / (1 + jnp.exp(-gate)) * up

    if not shape.num_experts:
        gate, up, down = (layer[name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
        return silu(x_TxD @ gate.T, x_TxD @ up.T) @ down.T
    logits_TxE = x_TxD @ layer["gate"]["weight"].T
    shares_TxK = jax.nn.softmax(jnp.take_along_axis(logits_TxE, experts_TxK, 1))
    gate, up, down = (layer["experts"][name]["weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    inner = silu(jnp.einsum("td,efd->tef", x_TxD, gate), jnp.einsum("td,efd->tef", x_TxD, up))
    every_TxExD = jnp.einsum("tef,edf->ted", inner, down)
    return jnp.einsum("tk,tkd->td", shares_TxK, jnp.take_along_axis(every_TxExD, experts_TxK[..., None], 1))


def log_probs(params, shape: model_config.TransformerConfig, tokens_T, temperature: float, experts_TxLxK=None):
    """Log-probabilities of tokens[1:], each after all tokens before it, of an untied Qwen3 (or Qwen3-MoE)."""
    x = params["embed_tokens"]["weight"][tokens_T]
    count, heads = len(tokens_T), shape.num_heads
    for number in range(shape.num_layers):
        layer = jax.tree.map(lambda leaf: leaf[number], params["layers"])  # noqa: B023
        attention = layer["self_attn"]
        y = _norm(x, layer["input_layernorm"]["weight"], shape.rms_norm_eps)
        q, k, v = (
            (y @ attention[name]["weight"].T).reshape(count, -1, shape.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = _rotated(_norm(q, attention["q_norm"]["weight"], shape.rms_norm_eps), shape.rope.theta)
        k = _rotated(_norm(k, attention["k_norm"]["weight"], shape.rms_norm_eps), shape.rope.theta)
        k, v = (jnp.repeat(array, heads // array.shape[1], 1) for array in (k, v))
        scores = jnp.einsum("qhk,shk->hqs", q, k) / np.sqrt(shape.head_dim)
        weights = jax.nn.softmax(jnp.where(np.tri(count, dtype=bool), scores, -jnp.inf))
        attended = jnp.einsum("hqs,shk->qhk", weights, v).reshape(count, -1)
        x = x + attended @ attention["o_proj"]["weight"].T
        y = _norm(x, layer["post_attention_layernorm"]["weight"], shape.rms_norm_eps)
        experts_TxK = None if experts_TxLxK is None else experts_TxLxK[:, number]
        x = x + _feed_forward(y, layer["mlp"], shape, experts_TxK)
    logits = _norm(x, params["norm"]["weight"], shape.rms_norm_eps) @ params["lm_head"]["weight"].T / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), jnp.asarray(tokens_T)[1:, None], 1)[:, 0]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _clipped_sum(params, shape, temperature, tokens_T, mask_T, behaviour_T, advantage, experts_TxLxK):
    """The clipped loss of a segment's trained tokens, a sum, and its gradients."""

    def total(params):
        found_T = log_probs(params, shape, tokens_T, temperature, experts_TxLxK)
        ratio_T = jnp.exp(jnp.where(mask_T[1:], found_T - behaviour_T[1:], 0.0))
        bounded_T = jnp.clip(ratio_T, 0.8, 1.2)
        return -jnp.where(mask_T[1:], jnp.minimum(ratio_T * advantage, bounded_T * advantage), 0.0).sum()

    return jax.value_and_grad(total)(params)


def loss_and_gradients(
    params, shape: model_config.TransformerConfig, rollouts, advantages, temperature: float, aggregation: str
):
    """Loss of a step and its gradients in float64, every segment in a row of its own with its whole context.

    The tokens of the context that other segments hold are masked. After the context there is padding, which no token
    before it sees.

    Args:
      params: float32 parameters on the host.
      shape: shape of the model.
      rollouts: the batch's.
      advantages: of each segment of each rollout.
      temperature: sampling temperature.
      aggregation: as in the config; the constant of `sequence_sum` is 1.
    """
    longest = max(segment.context_tokens for rollout in rollouts for segment in rollout.segments)
    value, gradients = 0.0, jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    trained = [sum(sum(segment.loss_mask[1:]) for segment in rollout.segments) for rollout in rollouts]
    count = sum(trained) if aggregation == "token_mean" else len(rollouts)

    def padded(values, before=0):
        array = np.zeros((longest, *np.shape(values)[1:]), np.asarray(values).dtype)
        array[before : before + len(values)] = values
        return array

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        for rollout, of_segments, tokens in zip(rollouts, advantages, trained, strict=True):
            weight = 1.0 / tokens if aggregation == "sequence_mean" else 1.0
            for segment, advantage in zip(rollout.segments, of_segments, strict=True):
                experts = None
                if shape.num_experts:
                    known = routed(segment)
                    assert len(known) == segment.context_tokens - 1
                    experts = np.frombuffer(b"".join(known), np.uint8).astype(int)
                    experts = padded(experts.reshape(len(known), shape.num_layers, -1))
                mask = padded(np.array([0, *segment.loss_mask[1:]], bool), segment.shared)
                behaviour = padded(np.array(segment.log_probs, float), segment.shared)
                of_segment = wide, shape, temperature, padded(segment.context()), mask, behaviour, advantage, experts
                part, of_part = _clipped_sum(*of_segment)
                value += weight * float(part) / count
                gradients = jax.tree.map(lambda a, b: a + weight * np.asarray(b) / count, gradients, of_part)  # noqa: B023
    return value, gradients
