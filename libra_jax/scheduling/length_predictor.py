"""A length predictor of stated error: the true remaining length times a log-normal factor, drawn once a request.

It stands for any model that predicts lengths from prompts. Requests go to the bucket that the prediction asks for;
slots that would idle serve the other buckets' requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from libra_jax import config as configuration
from libra_jax.scheduling import buckets, slots, state


class LengthPredictor(slots.SlotScheduler):
    """Buckets by predicted length.

    Args:
      config: `predictor_sigma` is the standard deviation of the logarithm of the error.
      remaining: request id to the tokens that it has still to generate.
      seed: of the errors; a request's depends on its id and the seed alone.
      degrees: tensor-parallel degrees of the layout, if known.
    """

    by_length = True

    def __init__(
        self,
        config: configuration.SchedulerConfig,
        remaining: Callable[[str], int],
        *,
        seed: int = 0,
        degrees: Sequence[int] = (),
    ) -> None:
        super().__init__(config, bounds=config.max_remaining_tokens, degrees=degrees)
        self._truth = remaining
        self._seed = seed
        self._errors: dict[str, float] = {}

    def arrived(self, request: state.Request, now: float) -> None:
        draw = random.Random(f"{self._seed}/{request.request_id}").gauss(0.0, self.config.predictor_sigma)
        self._errors[request.request_id] = math.exp(draw)

    def route(self, request: state.Request, now: float) -> int:
        request.remaining = self._truth(request.request_id) * self._errors[request.request_id]
        level = self.levels.of_length(request.remaining)
        request.wanted = self.home(request, level)
        return level

    def pick(self, request: state.Request, bucket: buckets.Bucket) -> state.Server:
        home = self.home(request, bucket.level)
        return bucket.least() if home is None or home.full else home

    def serves(self, bucket: buckets.Bucket, request: state.Request) -> bool:
        return True

    def finished(self, request: state.Request, completed: bool) -> None:
        del self._errors[request.request_id]
