"""Rollout engines: requests for tokens, the streamed replies, and the engine that serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from libra_jax.protocols.cluster import ActorAddress
from libra_jax.protocols.weights import WeightReceiver

FinishReason = Literal["stop", "length", "abort"]
NO_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True)
class SamplingOptions:
    """Settings that change the sampled distribution: a client may ask for them, and nothing that is trained has them.

    Attributes:
      top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, seed: as vLLM has them.
      schema: JSON schema of structured output, as text; "{}" for any object.
    """

    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    schema: str | None = None

    def used(self) -> dict[str, float | int | str]:
        """Returns the settings that a client asks for, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


NO_OPTIONS = SamplingOptions()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. Temperature only; the log-prob contract (engines/logprob_contract.py) gives the reason.

    Attributes:
      temperature: sampling temperature; 0 means greedy.
      max_tokens: maximum number of generated tokens.
      stop_token_ids: tokens that end the generation; the first one sampled is returned.
      options: further settings, of requests that nothing is trained on.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    options: SamplingOptions = NO_OPTIONS


@dataclass(frozen=True)
class GenerationRequest:
    """A context to continue.

    Attributes:
      request_id: unique among the engine's requests.
      token_ids: the whole context, including the tokens kept from a failed engine.
      sampling: sampling settings.
      routed_tokens: number of first tokens whose experts the caller has already; an engine that returns experts leaves
        these out.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    routed_tokens: int = 0


@dataclass(frozen=True)
class TokenDelta:
    """Tokens since the last delta; the three tuples have the same length.

    Attributes:
      token_ids: the new tokens.
      log_probs: natural log-probabilities at the sampling temperature (processed log-probs).
      policy_versions: version whose weights sampled each token.
      finish_reason: reason for the end; set on the last delta only.
      routing: experts that the engine chose for the tokens of the context that follow `GenerationRequest.routed_tokens`
        and the earlier deltas' (`Trajectory.routing`). The last sampled token has none until another token follows.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    # "abort" means that the output is incomplete: the request may continue on another engine.
    finish_reason: FinishReason | None = None
    routing: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class EngineInfo:
    """Description of an engine, returned once when the engine has started.

    Attributes:
      name: name of the instance in errors and on the timeline.
      tensor_parallel: number of devices that share one copy of the weights.
      slots: maximum number of requests that decode at once (vLLM's max_num_seqs).
      max_context: longest context in tokens.
      process_ids: ids of the engine's processes.
      cache_tokens: capacity of the key-value cache in tokens of context; 0 if the engine does not report it.
      accelerator: name of its accelerator's hardware sheet; empty if all instances have the same.
    """

    name: str
    tensor_parallel: int
    slots: int
    max_context: int
    process_ids: tuple[int, ...]
    cache_tokens: int = 0
    accelerator: str = ""


class RolloutEngine(WeightReceiver, Protocol):
    """A rollout instance. Every method may raise `WorkerLost`; the caller sets deadlines."""

    async def start(self) -> EngineInfo:
        """Starts the engine's processes. It holds no useful weights until its first `finish_weight_update`.

        Raises:
          WorkerLost: the engine did not start; the message has its reason.
        """
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Streams the continuation. The last delta has a finish reason. Closing the iterator aborts the request.

        Raises:
          WorkerLost: the engine died. The tokens received so far are valid, and another engine may continue.
          LibraError: the context has no room for another token, or holds a token that the model does not have.
        """
        ...

    async def pause(self) -> None:
        """Freezes decoding and keeps the requests. Returns when no step runs and all tokens so far are stamped."""
        ...

    async def resume(self) -> None:
        """Continues decoding. KV computed under older weights was dropped and is recomputed."""
        ...

    async def sleep(self) -> None:
        """Gives up the engine's devices: no request runs, and weights and cache are dropped if the platform allows."""
        ...

    async def wake(self) -> None:
        """Takes the devices back. As after `start`, the engine holds no useful weights until the next update."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Returns numbers such as `running` and `waiting`, both in requests.

        Raises:
          WorkerLost: the engine is not serving.
        """
        ...

    async def shutdown(self) -> None:
        """Ends and reaps every process of the engine. Idempotent."""
        ...


class EngineClient(RolloutEngine, Protocol):
    """A rollout engine as other rooms call it.

    Each call except `generate` has a deadline of `config.deadlines`: DeadlineMissed names the engine and the call. The
    caller of `generate` watches the time between two deltas itself, because a request may wait for a free slot.
    """

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    @property
    def address(self) -> ActorAddress:
        """Place of the engine, for other processes."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Streams the continuation. The last delta has a finish reason. Closing the iterator aborts the request."""
        ...
