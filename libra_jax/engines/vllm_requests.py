"""A request in vLLM's terms, and its outputs in ours. Written against vLLM 0.32."""

from __future__ import annotations

from typing import Any

import numpy as np
import vllm
from vllm.sampling_params import RequestOutputKind

from libra_jax import protocols

UNTRAINED = "default"
"""vLLM's name for the version of its initial weights."""


def sampling_params(sampling: protocols.SamplingParams, room: int, routed_tokens: int = 0) -> vllm.SamplingParams:
    """Returns vLLM's sampling parameters under the log-prob contract, of a request (`protocols.GenerationRequest`).

    `room` is the number of tokens that the engine's context has left.
    """
    # Never a per-request seed: on CPU the engine crashes if a seeded sample is discarded (vLLM 0.32).
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        max_tokens=min(sampling.max_tokens, room),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        routed_experts_prompt_start=routed_tokens,
        skip_clone=True,
        **{name: value for name, value in sampling.options.used().items() if name not in ("seed", "schema")},
    )


class RoutedExperts:
    """The experts of a request's tokens, as vLLM's state of the request collects them.

    vLLM 0.32 returns them with a request's last output only, and a request that moves or is cut off has none. Its state
    holds each step's from the moment they arrive, so they are taken from there with every output.

    Args:
      state: vLLM's state of the request, or None if the request ended before it could be read.
      wanted: tokens of the request's context whose experts are wanted.
    """

    def __init__(self, state: Any, wanted: int) -> None:
        self._chunks: list[np.ndarray] | None = None if state is None else state.routed_experts_chunks
        self._left = wanted - 1  # the last token takes its experts when the next one is sampled
        self._waiting: list[bytes] = []

    def take(self, completion: Any, new: int) -> tuple[bytes, ...]:
        """Returns the experts of the next tokens. The state may be ahead of an output that was read late."""
        chunks = self._chunks
        if chunks is None:
            chunks = [] if completion.routed_experts is None else [completion.routed_experts]
        self._waiting += [row.tobytes() for chunk in chunks for row in chunk]
        chunks.clear()
        count = min(self._left + new, len(self._waiting))
        self._left += new - count
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(taken)


def delta(completion: Any, state: Any, sent: int, routing: tuple[bytes, ...]) -> protocols.TokenDelta:
    """Returns the new tokens of a request's output, each with its log-probability and version.

    Args:
      completion: vLLM's output since the last one.
      state: as for `RoutedExperts`.
      sent: number of tokens before these.
      routing: experts of the next tokens.
    """
    # vLLM labels each step's tokens with their sampling version, in the engine's core process. It reports the spans
    # (version, index of the first token) with the last output. Until then they are in the request's own state.
    if completion.weight_versions is not None:
        starts = [(span.version, span.start) for span in completion.weight_versions]
    else:
        starts = [] if state is None else state.weight_version_starts
    tokens = tuple(completion.token_ids)
    versions: list[int] = []
    for version, first in starts:
        number = protocols.NO_VERSION if version == UNTRAINED else int(version)
        # Each span holds from its first token on; a later span overwrites the rest.
        del versions[max(0, first - sent) :]
        versions.extend([number] * (len(tokens) - len(versions)))
    # Any other reason of vLLM (an abort, an error) means that the output is incomplete.
    reason = completion.finish_reason
    if reason is not None and reason not in ("stop", "length"):
        reason = "abort"
    log_probs = tuple(completion.logprobs.logprobs) if tokens else ()
    return protocols.TokenDelta(tokens, log_probs, tuple(versions), reason, routing)
