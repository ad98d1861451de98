"""A teacher behind an endpoint, such as vLLM's: it scores the tokens of rollouts by their ids.

config.algorithm.teacher = "http://127.0.0.1:8000/v1"
config.algorithm.teacher_arguments = {"model": "my-teacher", "api_key_env": "TEACHER_API_KEY"}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import endpoints
from libra_jax.utils import deadlines, resolving

FIELD = "algorithm.teacher"

PROBE = "A teacher reads these words, and the numbers 1, 2 and 30."
"""Text that teacher and policy must split into the same tokens."""

LONGEST_PAUSE = 8.0
"""Longest wait between two tries of a request, in seconds (`endpoints.ServerEndpoint`)."""

ABOVE_ZERO = 1e-3
"""Largest value that rounding can make of a log-probability."""

OF_THE_MOMENT = (408, 409, 429)
"""Statuses below 500 that may pass by themselves."""


@dataclass
class ServedTeacher:
    """Scores tokens with a model behind an endpoint. Implements `protocols.Teacher`.

    It asks `/v1/completions` for one token after a prompt of ids, with vLLM's `prompt_logprobs`. vLLM computes these at
    temperature 1, for any temperature of the request.

    Attributes:
      url: address of the endpoint.
      endpoint: its client.
      model: name of the model there; empty until `start` if it serves only one.
      seconds: deadline of one request, its retries included.
      places: bounds the requests under way.
    """

    url: str
    endpoint: endpoints.ServerEndpoint
    model: str
    seconds: float
    places: asyncio.Semaphore = field(repr=False)

    async def start(self, tokenizer: protocols.Tokenizer, longest: int) -> None:
        """Finds out that the server can score rollouts.

        Args:
          tokenizer: the policy's.
          longest: most tokens of a rollout.

        Raises:
          ConfigError: no server answers, it has no such model, or the model cannot read or score the policy's tokens.
        """
        try:
            async with asyncio.timeout(self.seconds):
                models = (await self.endpoint.client.models.list()).data
        except Exception as error:  # the package's own errors, and those of its transport
            if getattr(error, "status_code", None) == 404:
                raise self._refusal(
                    f"{self.url} answers, but has no {self.url.rstrip('/')}/models; the URL of a vLLM server ends with "
                    "/v1, as in http://host:8000/v1"
                ) from None
            raise self._refusal(
                f"no model server answers at {self.url} ({self._said(error)}); start it before the run"
            ) from None
        # Of vLLM's servers, others do not say how long a context they take.
        context_sizes = {one.id: getattr(one, "max_model_len", None) for one in models}
        names = ", ".join(context_sizes) or "none"
        self.model = self.model or (names if len(context_sizes) == 1 else "")
        if self.model not in context_sizes:
            problem = f"has no model {self.model!r}" if self.model else "serves not just one model"
            raise self._refusal(f"{self.url} {problem}: name one of its models ({names}) as model", "teacher_arguments")
        room = context_sizes[self.model]
        if room is not None and room <= longest:
            raise self._refusal(
                f"{self.model} at {self.url} takes {room} tokens, and a rollout with one token after it may have "
                f"{longest + 1} (rollout.max_context + 1); serve it with a larger --max-model-len, or lower that"
            )
        probe = tokenizer.encode(PROBE)[:longest]
        try:
            _, texts = await self._ask(probe)
        except protocols.TeacherFailed as error:
            raise self._refusal(str(error)) from None
        # A server without a tokenizer has no texts.
        if all(text is not None for text in texts):
            ours, theirs = ("".join(text.split()) for text in (tokenizer.decode(probe[1:]), "".join(map(str, texts))))
            if ours != theirs:
                raise self._refusal(
                    f"{self.model} at {self.url} has another vocabulary: it reads the policy's tokens of {ours!r:.60} "
                    f"as {theirs!r:.60}; take a teacher with the policy's tokenizer"
                )

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        if len(token_ids) < 2:
            return [0.0] * len(token_ids)
        async with self.places:
            log_probs, _ = await self._ask(token_ids)
        return [0.0, *log_probs]

    async def _ask(self, token_ids: Sequence[int]) -> tuple[list[float], list[str | None]]:
        """Returns log-probability and text of each token but the first."""
        try:
            async with asyncio.timeout(self.seconds):
                reply = await self.endpoint.client.completions.with_raw_response.create(
                    model=self.model,
                    prompt=list(token_ids),
                    max_tokens=1,
                    extra_body={"prompt_logprobs": 0},
                )
        except Exception as error:  # the package's own errors, and those of its transport
            status, where = getattr(error, "status_code", 500), f"{self.model} at {self.url}"
            if status < 500 and status not in OF_THE_MOMENT:
                raise self._refusal(
                    f"{where} refuses {len(token_ids)} tokens ({self._said(error)}); it must have the policy's "
                    "vocabulary, and --max-model-len above rollout.max_context"
                ) from None
            # Without its cause, whose text may hold the key.
            raise protocols.TeacherFailed(f"the teacher {where} failed: {self._said(error)}") from None
        # Off the event loop: the reply to a long rollout has megabytes.
        try:
            return await deadlines.off_loop(_read, reply.content, token_ids)
        except ValueError as error:
            raise self._refusal(f"{self.model} at {self.url} {error}") from None

    def _said(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no answer within {self.seconds:g} s, retries included"
        return self.endpoint.safe(f"{type(error).__name__}: {error}")

    def _refusal(self, problem: str, name: str = "teacher") -> protocols.ConfigError:
        return protocols.ConfigError(f"config.algorithm.{name}: {problem}")


def _read(content: bytes, token_ids: Sequence[int]) -> tuple[list[float], list[str | None]]:
    """Reads a reply of vLLM: `{"choices": [{"prompt_logprobs": [null, {"<id>": {"logprob": x, ...}}, ...]}]}`.

    The ValueError of any other reply continues a sentence about the server.
    """
    try:
        choice: Any = json.loads(content)["choices"][0]
        entries = choice.get("prompt_logprobs")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"answers no completion: {content[:80]!r}") from None
    if not entries:
        raise ValueError("answers without prompt_logprobs; a teacher must be served by vLLM, which has this parameter")
    if len(entries) != len(token_ids):
        raise ValueError(f"answers {len(entries)} log-probabilities for {len(token_ids)} tokens; serve it uncut")
    log_probs, texts = [], []
    for position, (token, entry) in enumerate(zip(token_ids[1:], entries[1:], strict=True), 1):
        if not isinstance(entry, dict) or str(token) not in entry:
            raise ValueError(f"answers no log-probability of token {token} at position {position}")
        token_info = entry[str(token)] if isinstance(entry[str(token)], dict) else {}
        value = token_info.get("logprob")
        if not isinstance(value, int | float) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise ValueError(
                f"answers {value} at position {position}, which is no log-probability; serve it with vLLM's "
                "--logprobs-mode raw_logprobs"
            )
        log_probs.append(float(value))
        texts.append(token_info.get("decoded_token"))
    return log_probs, texts


def create(
    base_url: str,
    model: str = "",
    api_key_env: str = "",
    seconds: float = 60.0,
    retries: int = 3,
    concurrency: int = 32,
) -> ServedTeacher:
    """Returns a teacher behind an endpoint. Call it inside the event loop that it serves.

    Args:
      base_url: address of the endpoint, including "/v1".
      model: name of the model at the endpoint; empty if it serves only one.
      api_key_env: environment variable with the key. Empty if the endpoint needs no key.
      seconds: deadline of one try of a request, in seconds.
      retries: number of retries (`endpoints.ServerEndpoint`).
      concurrency: most requests under way.
    """
    name = f"{FIELD}_arguments"
    config_lib.check(concurrency > 0, name, f"concurrency must be positive, not {concurrency}")
    endpoint = endpoints.create(
        base_url,
        api_key_env=api_key_env,
        seconds=seconds,
        retries=retries,
        field_name=name,
        owner_prefix="the teacher's ",
    )
    total_seconds = (retries + 1) * seconds + retries * LONGEST_PAUSE
    return ServedTeacher(base_url, endpoint, model, total_seconds, asyncio.Semaphore(concurrency))


def check(config: config_lib.AlgorithmConfig) -> None:
    """Raises ConfigError if `create` does not take `algorithm.teacher_arguments`. Needs no key and no package."""
    resolving.check_arguments(create, f"{__name__}:create", _arguments(config), f"{FIELD}_arguments")


def from_config(config: config_lib.AlgorithmConfig) -> ServedTeacher:
    """Returns the config's teacher behind an endpoint. Asks no server. Raises ConfigError as `create`."""
    return resolving.call(create, f"{__name__}:create", _arguments(config), f"{FIELD}_arguments")


def _arguments(config: config_lib.AlgorithmConfig) -> dict[str, Any]:
    return {"base_url": config.teacher, **config.teacher_arguments}


@contextlib.asynccontextmanager
async def open_teacher(
    config: config_lib.RunConfig, tokenizer: protocols.Tokenizer
) -> AsyncIterator[ServedTeacher | None]:
    """Yields the teacher of a run, once it can score; None unless it is behind an endpoint."""
    if not config.algorithm.teacher_served:
        yield None
        return
    teacher = from_config(config.algorithm)
    try:
        await teacher.start(tokenizer, config.rollout.max_context)
        yield teacher
    finally:
        await teacher.endpoint.client.close()
