"""The hybrid replicas that help the core: their gradient channels, and the gradient sums that come over them.

What does not come, comes late, or is not exactly what was asked for is computed by the core itself, and its channel is
closed: a lost replica costs time, never a wrong gradient.

Thread-safety: members come and go on one thread while another trains with those whose shares it was given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.training import state as state_lib
from libra_jax.training import step
from libra_jax.weights import addresses, gradient_channel


class RefusedError(protocols.LibraError):
    """Gradient sums that are not of what was asked for."""


@dataclass(frozen=True)
class Wanted:
    """What a step takes from replicas.

    Attributes:
      version: policy version of the parameters.
      digest: of those parameters as published; None where they were not, and then nobody can have them.
      shares: who computes.
      ranges: which micro-batches each of them.
      arrays: that every sum has.
    """

    version: int
    digest: str | None
    shares: Sequence[protocols.Share]
    ranges: Sequence[range]
    arrays: Sequence[gradient_channel.ArrayKind]


class Members:
    """A gradient channel a replica.

    Args:
      config: when a share is late.
      connect_seconds: deadline for a replica to connect.
      host: address of this host to listen at, as the replicas reach it.
    """

    def __init__(
        self, config: config_lib.ElasticConfig, connect_seconds: float, host: str = addresses.LOOPBACK
    ) -> None:
        self._config = config
        self._connect_seconds = connect_seconds
        self._host = host
        self._listeners: dict[str, gradient_channel.Listener] = {}
        self._channels: dict[str, gradient_channel.Channel] = {}

    def listen(self, member: str, epoch: int) -> dict[str, Any]:
        """Opens a channel's meeting point here, in the core's first process; one from an earlier epoch is closed."""
        self.dismiss(member)
        listener = gradient_channel.Listener(member, epoch, jax.process_count() + 1, self._host)
        self._listeners[member] = listener
        return listener.address

    def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Begins to connect this process of the core.

        Raises:
          LibraError: the address is another member's, epoch's or trainer's.
        """
        if (address["member"], address["epoch"], address["ranks"]) != (member, epoch, jax.process_count() + 1):
            raise protocols.LibraError(
                f"the gradient channel of {address['member']} (epoch {address['epoch']}, {address['ranks']} ends) is "
                f"not the one to connect to {member} in epoch {epoch}: call listen for it first."
            )
        listener = self._listeners.pop(member, None)
        if listener is not None and listener.address != address:
            listener.close()
            listener = None
        self.dismiss(member)
        rank = jax.process_index()
        self._channels[member] = gradient_channel.Channel(address, rank, self._connect_seconds, listener)

    def dismiss(self, member: str) -> None:
        """Closes a replica's channel, if it has one."""
        if (listener := self._listeners.pop(member, None)) is not None:
            listener.close()
        if (channel := self._channels.pop(member, None)) is not None:
            channel.close("the core dismissed it")

    def close(self) -> None:
        """Closes every channel. Idempotent."""
        for member in [*self._listeners, *self._channels]:
            self.dismiss(member)

    def receive(self, wanted: Wanted, number: int, deadline: float) -> step.Received:
        """One replica's sums; those of earlier steps, which came too late, are dropped on the way.

        Args:
          wanted: the step's.
          number: of the share.
          deadline: on the monotonic clock.

        Raises:
          RefusedError: sums of something else were offered.
          ChannelError: nothing came in time, or the replica is gone.
        """
        share = wanted.shares[number]
        channel = self._channels.get(share.member)
        if channel is None:
            raise gradient_channel.ChannelError(
                f"{share.member} has no gradient channel: it has not joined or was late."
            )
        while True:
            header, arrays = channel.receive(wanted.arrays, deadline - time.monotonic())
            if (header.member, header.epoch) != (share.member, share.epoch) or header.version >= wanted.version:
                break
        _check(header, arrays, share, wanted, wanted.ranges[number])
        return step.Received(arrays, {"metrics": dict(header.metrics), "maxima": dict(header.maxima)})

    @property
    def grace(self) -> float:
        """Seconds that a share is waited for in any case, once those before it were not there."""
        return self._config.late_seconds

    def late_after(self, own_seconds: float) -> float:
        """Seconds to wait for shares once the core's own is done."""
        return max(self._config.late_seconds, self._config.late * own_seconds)


class Collection:
    """What a step gets from replicas, as a `learner.Rest`: their sums in order, or ranges for the core after all."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        self._members = members
        self._wanted = wanted
        self._micro_batches = {"arrived": 0, "late": 0, "refused": 0}
        self._dismissed: list[str] = []
        self._waited = 0.0
        self._bytes = 0

    def __call__(self, own_seconds: float) -> Iterator[range | step.Received]:
        """Yields as sums come in; for those that do not, `own_seconds` and the config say how long it waits."""
        deadline = time.monotonic() + self._members.late_after(own_seconds)
        missing: list[range] = []
        for number, indices in enumerate(self._wanted.ranges):
            if not indices:
                continue
            began = time.monotonic()
            received, outcome = None, "arrived"
            try:
                # One that is late takes nothing from those after it.
                limit = max(deadline, began + self._members.grace) if missing else deadline
                received = self._members.receive(self._wanted, number, limit)
            except RefusedError:
                outcome = "refused"
            except gradient_channel.ChannelError:
                outcome = "late"
            self._waited += time.monotonic() - began
            if everywhere(received is not None) and received is not None:
                self._bytes += sum(array.nbytes for array in received.arrays)
                self._micro_batches[outcome] += len(indices)
                yield received
            else:
                self._dismissed.append(self._wanted.shares[number].member)
                self._members.dismiss(self._dismissed[-1])
                self._micro_batches["late" if received is not None else outcome] += len(indices)
                missing.append(indices)
        yield from missing

    def metrics(self) -> dict[str, float]:
        """Micro-batches of replicas that counted, were late or refused; seconds waited for them, bytes received.

        `shares/late/<member>` is there for each member whose channel was closed.
        """
        return {
            "shares/micro_batches": float(self._micro_batches["arrived"]),
            "shares/late": float(self._micro_batches["late"]),
            "shares/refused": float(self._micro_batches["refused"]),
            "shares/wait_seconds": self._waited,
            "shares/bytes": float(self._bytes),
            **{f"shares/late/{member}": 1.0 for member in self._dismissed},
        }


def everywhere(here: bool) -> bool:
    """Whether it holds in every process of the core: sums are added by all of them, or by none."""
    return here if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(here)).all())


def array_kinds(accumulator: state_lib.Accumulator) -> list[gradient_channel.ArrayKind]:
    """The arrays that a sum has: the leaves of an accumulator, in order."""
    return [(str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for leaf in jax.tree.leaves(accumulator)]


def _check(
    header: gradient_channel.Header,
    arrays: Sequence[np.ndarray],
    share: protocols.Share,
    wanted: Wanted,
    indices: range,
) -> None:
    """Raises RefusedError unless the sums are those of these micro-batches under these parameters."""
    pairs: dict[str, tuple[Any, Any]] = {
        "member": (header.member, share.member),
        "epoch": (header.epoch, share.epoch),
        "version": (header.version, wanted.version),
        "digest": (header.digest, wanted.digest),
        "micro-batches": ((header.first, header.last), (indices.start, indices.stop)),
    }
    if jax.process_index() > 0:  # what was published only the first process knows; it checks for all
        del pairs["digest"]
    for name, (offered, asked) in pairs.items():
        if offered != asked:
            raise RefusedError(
                f"{share.member} offered gradient sums of {name} {offered}, not {asked}; it was dismissed."
            )
    # Loss and count come last. The core will find out whether the batch is to blame, or the replica.
    if not all(math.isfinite(float(scalar)) for scalar in arrays[-2:]):
        raise RefusedError(f"{share.member} offered a loss that is not finite; it was dismissed.")
