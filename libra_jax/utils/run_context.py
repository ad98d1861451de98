"""What the parts of one run share, as one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax import protocols


@dataclass(frozen=True)
class RunContext:
    """What the parts of one run share.

    Attributes:
      config: the run's configuration.
      cluster: makes the actors. The coordinator shuts it down when the run ends.
      recorder: writes what happens.
      workdir: the run's folder; checkpoints go there, and the run resumes from there.
      scope: runs work in the background until the run ends, and ends the run.
      events: delivers what happens to the parts that subscribed.
      clock: returns the present time in seconds: that of the event loop, virtual in a simulation. A run reads no other.
      fencing: the run's fencing token in its workdir. A later token ends the run. None disables fencing.
    """

    config: config_lib.RunConfig
    cluster: protocols.Cluster
    recorder: protocols.Recorder
    workdir: Path
    scope: protocols.Scope
    events: protocols.Events = field(default_factory=protocols.Events)
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    fencing: protocols.FencingToken | None = None
