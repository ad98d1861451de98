"""The parts of a step that hybrid workers compute: their split, their gradient channels, and their collection.

The core itself computes a share that is lost, late or different from the request, and closes that worker's channel.
A lost hybrid worker therefore costs time, never a wrong gradient.

Thread-safety: one thread adds and removes hybrid workers while another thread trains with the shares that it was given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.training import state as state_lib
from libra_jax.training import step
from libra_jax.utils import machine
from libra_jax.weights import gradient_channel


class RefusedError(protocols.LibraError):
    """Gradient sums that do not match the request."""


def split(work: Sequence[int], shares: Sequence[protocols.Share]) -> tuple[range, ...]:
    """Returns ranges of whole micro-batches: the core's first, then each hybrid worker's, in the order of `shares`.

    The core and every hybrid worker call this pure function, so the split itself is never sent.

    The micro-batches' work lies on a line from 0 to 1. The core's part ends at 1 minus the sum of all fractions. Each
    hybrid worker's part follows, as long as its fraction. Each end moves to the nearest border between micro-batches,
    or to the earlier border if two are equally near. The core has at least the first micro-batch; a hybrid worker may
    have none.

    Args:
      work: work of each micro-batch, in any unit, above zero (rows x columns).
      shares: shares whose fractions sum to less than 1.

    Raises:
      ConfigError: there is nothing to split, the fractions are out of range or leave the core nothing, or one hybrid
        worker has two shares.
    """
    fractions = [share.fraction for share in shares]
    if not work or min(work) <= 0:
        raise protocols.ConfigError("a step is split by the work of its micro-batches, each above zero")
    if not all(0 < fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
        raise protocols.ConfigError(
            f"shares of {', '.join(f'{fraction:g}' for fraction in fractions)} of a step: each must lie in (0, 1), and "
            "together they must leave a part to the core"
        )
    if len({share.worker for share in shares}) < len(shares):
        raise protocols.ConfigError(f"a worker has two shares of a step: {', '.join(share.worker for share in shares)}")
    borders = [0]
    for item in work:
        borders.append(borders[-1] + item)
    ends: list[int] = []
    for behind in range(len(fractions)):
        target = (1.0 - sum(fractions[behind:])) * borders[-1]
        # From index 1, so that the core keeps a micro-batch; `min` returns the earlier of two equally near borders.
        nearest = min(range(1, len(borders)), key=lambda index: abs(borders[index] - target))
        ends.append(max(nearest, *ends) if ends else nearest)
    firsts = [0, *ends]
    return tuple(range(first, last) for first, last in zip(firsts, [*ends, len(work)], strict=True))


@dataclass(eq=False)
class Channels:
    """The gradient channels of the core, one for each hybrid worker.

    Attributes:
      config: limits after which a share counts as late.
      connect_seconds: seconds in which a hybrid worker has to connect.
      host: address of this host to listen at, as the hybrid workers reach it.
    """

    config: config_lib.ElasticConfig
    connect_seconds: float
    host: str = machine.LOOPBACK
    _listeners: dict[str, gradient_channel.ChannelListener] = field(default_factory=dict, init=False)
    _channels: dict[str, gradient_channel.Channel] = field(default_factory=dict, init=False)

    def listen(self, worker: str, generation: int) -> dict[str, Any]:
        """Opens a listener in the core's first process; closes the listener of an earlier membership generation."""
        self.dismiss(worker)
        # One end for each process of the core, and one for the hybrid worker.
        listener = gradient_channel.ChannelListener(worker, generation, jax.process_count() + 1, self.host)
        self._listeners[worker] = listener
        return listener.address

    def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        """Starts to connect this process of the core to a hybrid worker's channel.

        Raises:
          LibraError: the address belongs to another hybrid worker, membership generation or trainer.
        """
        if (address["worker"], address["generation"], address["ranks"]) != (
            worker,
            generation,
            jax.process_count() + 1,
        ):
            raise protocols.LibraError(
                f"the gradient channel of {address['worker']} (generation {address['generation']}, {address['ranks']} "
                f"ends) is not the one to connect to {worker} in generation {generation}: call listen for it first."
            )
        listener = self._listeners.pop(worker, None)
        if listener is not None and listener.address != address:
            listener.close()
            listener = None
        self.dismiss(worker)
        rank = jax.process_index()
        self._channels[worker] = gradient_channel.Channel(address, rank, self.connect_seconds, listener)

    def get(self, worker: str) -> gradient_channel.Channel:
        """Returns the channel of a hybrid worker.

        Raises:
          ChannelError: the hybrid worker has none.
        """
        channel = self._channels.get(worker)
        if channel is None:
            raise gradient_channel.ChannelError(f"{worker} has no gradient channel: it has not joined or was late.")
        return channel

    def dismiss(self, worker: str) -> None:
        """Closes the channel of a hybrid worker, if the worker has one."""
        if (listener := self._listeners.pop(worker, None)) is not None:
            listener.close()
        if (channel := self._channels.pop(worker, None)) is not None:
            channel.close("the core dismissed it")

    def close(self) -> None:
        """Closes every channel. Idempotent."""
        for worker in [*self._listeners, *self._channels]:
            self.dismiss(worker)


class Collection:
    """The hybrid workers' part of a step, as a `learner.Rest`: yields sums, or ranges that the core must compute.

    Args:
      channels: the core's channels.
      version: policy version of the step's parameters.
      digest: digest of these parameters as synced. None if this version was not synced: no hybrid worker has it then.
      shares: one share for each hybrid worker that computes.
      ranges: micro-batches of each share, in the order of `shares`.
      accumulator: shapes and dtypes of a sum.
    """

    def __init__(
        self,
        channels: Channels,
        *,
        version: int,
        digest: str | None,
        shares: Sequence[protocols.Share],
        ranges: Sequence[range],
        accumulator: state_lib.Accumulator,
    ) -> None:
        self._channels = channels
        self._version = version
        self._digest = digest
        self._shares = shares
        self._ranges = ranges
        self._arrays = [(str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for leaf in jax.tree.leaves(accumulator)]
        self._micro_batches = {"arrived": 0, "late": 0, "refused": 0}
        self._dismissed: list[str] = []
        self._waited = 0.0
        self._bytes = 0

    def __call__(self, own_seconds: float) -> Iterator[range | step.Received]:
        """Yields sums in order, then the missing ranges. `own_seconds` and the config set the deadline."""
        config = self._channels.config
        # At least `late_min_seconds`, because a multiple of a very short own time would be no time at all.
        deadline = time.monotonic() + max(config.late_min_seconds, config.late_factor * own_seconds)
        missing: list[range] = []
        for share, indices in zip(self._shares, self._ranges, strict=True):
            if not indices:
                continue
            start = time.monotonic()
            received, outcome = None, "arrived"
            try:
                # A late share must not use up the waiting time of the shares after it.
                limit = max(deadline, start + config.late_min_seconds) if missing else deadline
                received = self._receive(share, indices, limit)
            except RefusedError:
                outcome = "refused"
            except gradient_channel.ChannelError:
                outcome = "late"
            self._waited += time.monotonic() - start
            # All processes of the core have to add the same sums, so a share counts only if every process received it.
            everywhere = received is not None
            if jax.process_count() > 1:
                everywhere = bool(multihost_utils.process_allgather(np.array(everywhere)).all())
            if everywhere and received is not None:
                self._bytes += sum(array.nbytes for array in received.arrays)
                self._micro_batches[outcome] += len(indices)
                yield received
            else:
                self._dismissed.append(share.worker)
                self._channels.dismiss(share.worker)
                self._micro_batches["late" if received is not None else outcome] += len(indices)
                missing.append(indices)
        yield from missing

    def _receive(self, share: protocols.Share, indices: range, deadline: float) -> step.Received:
        """Receives the sums of one hybrid worker, and checks whether they belong to these micro-batches and parameters.

        Raises:
          RefusedError: the sums do not match the request.
          ChannelError: nothing arrived by the deadline (monotonic clock), or the hybrid worker is gone.
        """
        channel = self._channels.get(share.worker)
        while True:
            header, arrays = channel.receive(self._arrays, deadline - time.monotonic())
            # Sums of an earlier version are leftovers of a step that stopped waiting; other errors are refused below.
            if (header.worker, header.generation) != (
                share.worker,
                share.generation,
            ) or header.version >= self._version:
                break
        pairs: dict[str, tuple[Any, Any]] = {
            "worker": (header.worker, share.worker),
            "generation": (header.generation, share.generation),
            "version": (header.version, self._version),
            "digest": (header.digest, self._digest),
            "micro-batches": ((header.first, header.last), (indices.start, indices.stop)),
        }
        if jax.process_index() > 0:  # only the first process knows the synced digest; it checks for all
            del pairs["digest"]
        for name, (offered, expected) in pairs.items():
            if offered != expected:
                raise RefusedError(
                    f"{share.worker} offered gradient sums of {name} {offered}, not {expected}; it was dismissed."
                )
        # Loss and count come last. The core recomputes the share, and so finds out whether the batch was to blame.
        if not all(math.isfinite(float(scalar)) for scalar in arrays[-2:]):
            raise RefusedError(f"{share.worker} offered a loss that is not finite; it was dismissed.")
        return step.Received(arrays, {"metrics": dict(header.metrics), "maxima": dict(header.maxima)})

    def metrics(self) -> dict[str, float]:
        """Returns counts of arrived, late and refused micro-batches, seconds waited and bytes received.

        `shares/late/<worker>` exists for each hybrid worker whose channel was closed.
        """
        return {
            "shares/micro_batches": float(self._micro_batches["arrived"]),
            "shares/late": float(self._micro_batches["late"]),
            "shares/refused": float(self._micro_batches["refused"]),
            "shares/wait_seconds": self._waited,
            "shares/bytes": float(self._bytes),
            **{f"shares/late/{worker}": 1.0 for worker in self._dismissed},
        }
