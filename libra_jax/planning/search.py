"""Decides which devices train and which roll out: the mesh, the instances of each degree, and their length ranges.

With max staleness above 0 both stages run side by side, and the step takes the slower stage's time T. A longer T needs
fewer devices in both stages. So the search looks for the shortest T at which the fewest training devices (`meshes`) and
the fewest rollout devices (`partition`) fit together. At max staleness 0 one stage waits for the other and their times
add up. Then each mesh of the front is tried, if its rollout could still beat the best so far.

Spare devices go to the stage that they make faster.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import protocols
from libra_jax.planning import meshes, partition, serving
from libra_jax.planning.serving import Demand

PARTS = 256
"""Most places at which the requests may be cut; more if there are more devices."""

PARTS_A_DEVICE = 2

LOOKED_AT, BESIDE = 32, 2
"""Most splits in a picture, and how many of them are next to the best on either side."""

SLOWER, TRIED = 64.0, 96
"""Longest step that is tried for the sake of fewer devices, relative to the shortest, and the number of lengths
tried."""


@dataclass(frozen=True)
class Split:
    """One way to split the devices, with the best use of each part.

    Attributes:
      train: the mesh.
      rollout: the instances.
      rollout_seconds: seconds of a training step's requests.
      step_seconds: time of the slower stage at max staleness above 0, sum of both at 0.
    """

    train: meshes.Mesh
    rollout: tuple[protocols.PlannedBucket, ...]
    rollout_seconds: float
    step_seconds: float

    @property
    def plan(self) -> protocols.Plan:
        """The split as a plan."""
        train = self.train
        return protocols.Plan(train.data, train.fsdp, train.tensor, self.rollout, train.context)

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.plan.train_devices + self.plan.rollout_devices


class Search:
    """Splits of any number of devices for the same work.

    Args:
      rollout: times of instances.
      training: times of meshes.
      most: most devices that will be asked about.
      staleness: max staleness.
      mesh: (data, fsdp, tensor) of the only possible mesh; None leaves it to the search.
      reach: most devices of a mesh that a running trainer can change to; None: any mesh.

    Raises:
      ConfigError: the model fits on no mesh of `most` devices, or a request on no instance; the message says what is
        short.
    """

    def __init__(
        self,
        rollout: serving.Serving,
        training: meshes.Training,
        most: int,
        *,
        staleness: int,
        mesh: tuple[int, int, int] | None = None,
        reach: int | None = None,
    ) -> None:
        self.demand: Demand = rollout.demand
        self._staleness = staleness
        if mesh is not None:
            self._front: tuple[meshes.Mesh, ...] = (training.mesh(*mesh),)
        else:
            self._front = training.front(min(most, reach or most), whole_rows=reach is not None)
        edges = self.demand.edges(max(PARTS, PARTS_A_DEVICE * most))
        self._partitions = partition.Partitions(rollout.seconds, edges, rollout.degrees)
        if math.isinf(self._partitions.least_seconds):
            raise protocols.ConfigError(
                f"no instance holds a context of {int(self.demand.peak.max())} tokens beside the weights, not even one "
                f"of tensor-parallel degree {max(rollout.degrees)}; lower rollout.max_context or take wider instances"
            )

    def weighed(self, ratio: float, more: float = 0.0) -> Search:
        """Returns the same search with training that takes `ratio` times as long, and `more` seconds on top."""
        # Shares the partitions, whose times are the costly part and do not change.
        other = copy.copy(self)
        other._front = tuple(dataclasses.replace(mesh, seconds=ratio * mesh.seconds + more) for mesh in self._front)
        return other

    def best(self, devices: int) -> Split:
        """Returns the split of `devices` devices with the shortest step.

        Raises:
          ConfigError: they are too few to train and roll out; the message says how many each stage takes.
        """
        best: Split | None = None
        if self._staleness:
            both = partition.shortest(
                lambda limit: self._within(limit, devices),
                max(self._partitions.least_seconds, self._front[-1].seconds),
                partition.ANY_SECONDS,
                lambda both: max(both[0].seconds, both[1].seconds),
            )
            if both is not None:
                # Neither stage needs the spare devices for this time, and the slower stage cannot use them, or it would
                # have been faster.
                left = devices - both[1].devices
                mesh = max((item for item in self._front if item.devices <= left), key=lambda item: item.devices)
                best = self._split(mesh, self._partitions.fastest(devices - mesh.devices) or both[1])
        else:
            for mesh in self._front:
                # Rollout may take only as long as would still beat the best step.
                below = math.inf if best is None else best.step_seconds - mesh.seconds
                if mesh.devices >= devices or below <= 0:
                    continue
                served = self._partitions.fastest(devices - mesh.devices, below=below)
                if served is not None and served.seconds < below:
                    best = self._split(mesh, served)
        if best is not None:
            return best
        served = self._partitions.within(partition.ANY_SECONDS)
        assert served is not None
        raise protocols.ConfigError(
            f"{devices} devices are too few: training takes at least {self._front[0].devices} to hold the model and "
            f"its activations, and rollout at least {served.devices} more; take "
            f"{self._front[0].devices + served.devices} or more"
        )

    def cheapest(self, seconds: float, devices: int) -> Split:
        """Returns the split with the fewest devices, `devices` at most, whose step takes no longer than `seconds`.

        Raises:
          ConfigError: there is none; the message says how long the shortest step takes.
        """
        found = self._cheapest(seconds, devices)
        if found is None:
            best = self.best(devices)
            raise protocols.ConfigError(
                f"no plan of {devices} devices takes a step in {seconds:g} s; the fastest takes {best.step_seconds:.1f}"
            )
        return found

    def thriftiest(self, devices: int) -> Split:
        """Returns the split of at most `devices` devices with the fewest device-seconds a step: the most tokens for
        each device.

        Tries `TRIED` step lengths of up to `SLOWER` times the shortest.

        Raises:
          ConfigError: the devices are too few to train and roll out.
        """
        found = [self.best(devices)]
        for factor in np.geomspace(1.0, SLOWER, TRIED):
            other = self._cheapest(float(factor) * found[0].step_seconds, devices)
            if other is not None:
                found.append(other)
        return min(found, key=lambda split: split.devices * split.step_seconds)

    def _cheapest(self, seconds: float, devices: int) -> Split | None:
        # The times were found by a search that ends at this precision.
        seconds *= 1.0 + partition.PRECISION
        best: Split | None = None
        for mesh in self._front:
            # Side by side, rollout has the whole time; in turn, it has what training leaves.
            left = seconds if self._staleness else seconds - mesh.seconds
            if mesh.seconds > seconds or left <= 0 or mesh.devices >= devices:
                continue
            served = self._partitions.within(left)
            if served is not None and mesh.devices + served.devices <= devices:
                split = self._split(mesh, served)
                if best is None or split.devices < best.devices:
                    best = split
            if self._staleness:  # a larger mesh would not make the rollout part smaller
                break
        return best

    def splits(self, devices: int, near: Split | None = None) -> Iterator[Split]:
        """Yields meshes of the front with the best rollout on the remaining devices, fewest training devices first.

        Args:
          devices: devices of both stages.
          near: limits many meshes to those next to this split's, and some spread over the others; None: all of them.
        """
        chosen = list(range(len(self._front)))
        if near is not None and len(chosen) > LOOKED_AT:
            at = self._front.index(near.train)
            beside = chosen[max(0, at - BESIDE) : at + BESIDE + 1]
            chosen = sorted({*beside, *chosen[:: -(-len(chosen) // (LOOKED_AT - len(beside)))]})
        for mesh in [self._front[index] for index in chosen]:
            served = self._partitions.fastest(devices - mesh.devices) if mesh.devices < devices else None
            if served is not None:
                yield self._split(mesh, served)

    def rollout_seconds(self, rollout: Sequence[protocols.PlannedBucket]) -> float:
        """Returns the seconds of a training step's requests on these instances, shared out in the best way; infinite
        if some fit none."""
        served = self._partitions.over([bucket.tensor_parallel for bucket in rollout for _ in range(bucket.count)])
        return math.inf if served is None else served.seconds

    def ranges(self, rollout: Sequence[protocols.PlannedBucket]) -> tuple[protocols.PlannedBucket, ...]:
        """Returns the same instances with the length ranges that make the slowest instance fastest."""
        served = self._partitions.over([bucket.tensor_parallel for bucket in rollout for _ in range(bucket.count)])
        if served is None:
            return tuple(rollout)
        drawn = {bucket.tensor_parallel: bucket.max_remaining_tokens for bucket in self._buckets(served)}
        bounds, least = [], 0
        for bucket in rollout:  # instances without work get the smallest possible range
            least = max(least + 1, drawn.get(bucket.tensor_parallel, 0))
            bounds.append(dataclasses.replace(bucket, max_remaining_tokens=least))
        return tuple(bounds)

    def _within(self, limit: float, devices: int) -> tuple[meshes.Mesh, partition.Partition] | None:
        """Returns the mesh and the instances with the fewest devices that meet the limit; None if they need too
        many."""
        # The front is sorted by devices, so the first fast enough mesh is the smallest.
        mesh = next((item for item in self._front if item.seconds <= limit), None)
        if mesh is None or mesh.devices >= devices:
            return None
        served = self._partitions.within(limit)
        return (mesh, served) if served is not None and mesh.devices + served.devices <= devices else None

    def _split(self, mesh: meshes.Mesh, served: partition.Partition) -> Split:
        times = mesh.seconds, served.seconds
        return Split(mesh, self._buckets(served), served.seconds, max(times) if self._staleness else sum(times))

    def _buckets(self, served: partition.Partition) -> tuple[protocols.PlannedBucket, ...]:
        """Returns the runs by degree, the narrowest first; each degree's longest request bounds its bucket.

        If several degrees serve requests of one length, the wider degrees' bounds are a token more. The scheduler
        then chooses among them.
        """
        buckets: list[protocols.PlannedBucket] = []
        # Runs go from the longest requests to the shortest, buckets the other way.
        for degree, runs in itertools.groupby(reversed(served.runs), key=lambda run: run.degree):
            mine = list(runs)
            longest = math.ceil(self.demand.tokens[mine[-1].first])
            longest = max(longest, buckets[-1].max_remaining_tokens + 1) if buckets else longest
            buckets.append(protocols.PlannedBucket(degree, len(mine), longest))
        return tuple(buckets)


def compared(best: Split, splits: Sequence[Split]) -> str:
    """Explains in a sentence why the runner-up lost."""
    others = [item for item in splits if item.train.devices != best.train.devices]
    if not others:
        return "no other split fits"
    second = min(others, key=lambda item: item.step_seconds)
    more = second.step_seconds / best.step_seconds - 1.0
    if second.train.seconds > second.rollout_seconds:
        reason = f"training takes {second.train.seconds:.1f} s on {second.train.devices} devices"
    else:
        reason = f"rollout takes {second.rollout_seconds:.1f} s on the {second.plan.rollout_devices} devices left"
    # The search stops at a precision, so the runner-up may even be shorter by less than the printed digits.
    longer = f"{100 * more:.1f}% longer" if more >= 0.0005 else "no shorter"
    return f"{second.train.devices} training devices would make the step {longer}: {reason}"
