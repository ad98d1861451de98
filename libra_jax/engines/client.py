"""The typed client of a rollout engine. It knows protocols only, so the coordinator may import it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.protocols import RolloutEngine
from libra_jax.utils import typed_clients


class EngineActorClient(typed_clients.ActorClient, protocols.EngineClient):
    """A rollout engine, for one life of its processes. See `typed_clients.ActorClient` for the arguments."""

    def __init__(
        self, cluster: protocols.Cluster, spec: protocols.ActorSpec, limits: config_lib.DeadlineConfig
    ) -> None:
        super().__init__(cluster, spec, limits, kind="engine")

    start = typed_clients.ClientMethod("engine_start", "start", RolloutEngine.start)
    health = typed_clients.ClientMethod("first_token", "answer a health check", RolloutEngine.health)
    shutdown = typed_clients.ClientMethod("shutdown", "shut down", RolloutEngine.shutdown)

    def generate(self, request: protocols.GenerationRequest) -> AsyncGenerator[protocols.TokenDelta, None]:
        return self._actor.stream(RolloutEngine.generate, request)

    # Weights -----------------------------------------------------------------------------------------------------

    pause = typed_clients.ClientMethod("weight_sync", "pause", RolloutEngine.pause)
    resume = typed_clients.ClientMethod("weight_sync", "resume", RolloutEngine.resume)
    init_weight_transfer = typed_clients.ClientMethod(
        "weight_sync", "open its weight transport", RolloutEngine.init_weight_transfer
    )
    start_weight_update = typed_clients.ClientMethod(
        "weight_sync", "prepare for new weights", RolloutEngine.start_weight_update
    )
    update_weights = typed_clients.ClientMethod(
        "weight_sync", "load weight chunk {0.index}", RolloutEngine.update_weights
    )
    finish_weight_update = typed_clients.ClientMethod(
        "weight_sync", "finish its weight update", RolloutEngine.finish_weight_update
    )

    # Switching sides ---------------------------------------------------------------------------------------------

    sleep = typed_clients.ClientMethod("transition", "sleep", RolloutEngine.sleep)
    wake = typed_clients.ClientMethod("transition", "wake up", RolloutEngine.wake)
