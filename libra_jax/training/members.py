"""The core's side of the gradient channels: receives gradient sums from the hybrid workers that help.

The core itself computes a share that is lost, late or different from the request, and closes that worker's channel.
A lost hybrid worker therefore costs time, never a wrong gradient.

Thread-safety: one thread adds and removes hybrid workers while another thread trains with the shares that it was given.
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
    """Gradient sums that do not match the request."""


@dataclass(frozen=True)
class Wanted:
    """The sums that a step requests from hybrid workers.

    Attributes:
      version: policy version of the parameters.
      digest: digest of these parameters as synced. None if this version was not synced: no hybrid worker has it then.
      shares: one share for each hybrid worker that computes.
      ranges: micro-batches of each share, in the order of `shares`.
      arrays: shapes and dtypes of the arrays in every sum.
    """

    version: int
    digest: str | None
    shares: Sequence[protocols.Share]
    ranges: Sequence[range]
    arrays: Sequence[gradient_channel.ArrayKind]


class Members:
    """The gradient channels of the core, one for each hybrid worker.

    Args:
      config: limits after which a share counts as late.
      connect_seconds: seconds in which a hybrid worker has to connect.
      host: address of this host to listen at, as the hybrid workers reach it.
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
        """Opens a listener in the core's first process; closes the listener of an earlier membership generation."""
        self.dismiss(member)
        # One end for each process of the core, and one for the hybrid worker.
        listener = gradient_channel.Listener(member, epoch, jax.process_count() + 1, self._host)
        self._listeners[member] = listener
        return listener.address

    def connect(self, member: str, epoch: int, address: Mapping[str, Any]) -> None:
        """Starts to connect this process of the core to a hybrid worker's channel.

        Raises:
          LibraError: the address belongs to another hybrid worker, membership generation or trainer.
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
        """Closes the channel of a hybrid worker, if the worker has one."""
        if (listener := self._listeners.pop(member, None)) is not None:
            listener.close()
        if (channel := self._channels.pop(member, None)) is not None:
            channel.close("the core dismissed it")

    def close(self) -> None:
        """Closes every channel. Idempotent."""
        for member in [*self._listeners, *self._channels]:
            self.dismiss(member)

    def receive(self, wanted: Wanted, number: int, deadline: float) -> step.Received:
        """Receives the sums of one hybrid worker. Drops sums of earlier steps, which arrived too late.

        Args:
          wanted: the step's request.
          number: index of the share in `wanted.shares`.
          deadline: deadline on the monotonic clock.

        Raises:
          RefusedError: the sums do not match the request.
          ChannelError: nothing arrived in time, or the hybrid worker is gone.
        """
        share = wanted.shares[number]
        channel = self._channels.get(share.member)
        if channel is None:
            raise gradient_channel.ChannelError(
                f"{share.member} has no gradient channel: it has not joined or was late."
            )
        while True:
            header, arrays = channel.receive(wanted.arrays, deadline - time.monotonic())
            # Sums of an earlier version are leftovers of a step that stopped waiting; `_check` refuses other errors.
            if (header.member, header.epoch) != (share.member, share.epoch) or header.version >= wanted.version:
                break
        _check(header, arrays, share, wanted, wanted.ranges[number])
        return step.Received(arrays, {"metrics": dict(header.metrics), "maxima": dict(header.maxima)})

    @property
    def grace(self) -> float:
        """Minimum seconds to wait for a share after an earlier share was missing."""
        return self._config.late_min_seconds

    def late_after(self, own_seconds: float) -> float:
        """Returns the seconds to wait for shares after the core has computed its own share."""
        # At least `late_min_seconds`, because a multiple of a very short own time would be no time at all.
        return max(self._config.late_min_seconds, self._config.late_factor * own_seconds)


class Collection:
    """The hybrid workers' part of a step, as a `learner.Rest`: yields sums, or ranges that the core must compute."""

    def __init__(self, members: Members, wanted: Wanted) -> None:
        self._members = members
        self._wanted = wanted
        self._micro_batches = {"arrived": 0, "late": 0, "refused": 0}
        self._dismissed: list[str] = []
        self._waited = 0.0
        self._bytes = 0

    def __call__(self, own_seconds: float) -> Iterator[range | step.Received]:
        """Yields sums in order, then the missing ranges. `own_seconds` and the config set the deadline."""
        deadline = time.monotonic() + self._members.late_after(own_seconds)
        missing: list[range] = []
        for number, indices in enumerate(self._wanted.ranges):
            if not indices:
                continue
            began = time.monotonic()
            received, outcome = None, "arrived"
            try:
                # A late share must not use up the waiting time of the shares after it.
                limit = max(deadline, began + self._members.grace) if missing else deadline
                received = self._members.receive(self._wanted, number, limit)
            except RefusedError:
                outcome = "refused"
            except gradient_channel.ChannelError:
                outcome = "late"
            self._waited += time.monotonic() - began
            # All processes of the core have to add the same sums, so a share counts only if every process received it.
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
        """Returns counts of arrived, late and refused micro-batches, seconds waited and bytes received.

        `shares/late/<member>` exists for each hybrid worker whose channel was closed.
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
    """Returns True if `here` is True in every process of the core: either all of them add a sum, or none does."""
    return here if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(here)).all())


def array_kinds(accumulator: state_lib.Accumulator) -> list[gradient_channel.ArrayKind]:
    """Returns the kinds of the arrays in a sum: the leaves of an accumulator, in order."""
    return [(str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for leaf in jax.tree.leaves(accumulator)]


def _check(
    header: gradient_channel.Header,
    arrays: Sequence[np.ndarray],
    share: protocols.Share,
    wanted: Wanted,
    indices: range,
) -> None:
    """Raises RefusedError unless the sums belong to these micro-batches under these parameters."""
    pairs: dict[str, tuple[Any, Any]] = {
        "member": (header.member, share.member),
        "epoch": (header.epoch, share.epoch),
        "version": (header.version, wanted.version),
        "digest": (header.digest, wanted.digest),
        "micro-batches": ((header.first, header.last), (indices.start, indices.stop)),
    }
    if jax.process_index() > 0:  # only the first process knows the synced digest; it checks for all
        del pairs["digest"]
    for name, (offered, asked) in pairs.items():
        if offered != asked:
            raise RefusedError(
                f"{share.member} offered gradient sums of {name} {offered}, not {asked}; it was dismissed."
            )
    # Loss and count come last. The core recomputes the share, and so finds out whether the batch was to blame.
    if not all(math.isfinite(float(scalar)) for scalar in arrays[-2:]):
        raise RefusedError(f"{share.member} offered a loss that is not finite; it was dismissed.")
