"""Decides which devices train and which roll out: the mesh, the instances of each degree, and their length ranges.

The search has two halves. Bounds propose layouts, and `step` predicts what each of them takes.

- Bounds. With max staleness above 0 both stages run side by side, and a step takes at least the slower stage's time T.
  A longer T needs fewer devices in both stages. So the search looks for the shortest T at which the fewest training
  devices (`meshes`) and the fewest rollout devices (`partition`) fit together. At max staleness 0 one stage waits for
  the other and their times add up. Then each mesh of the front is tried, if its rollout could still beat the best so
  far. This layout mixes degrees as if all lengths were known. If steps stream, rollout may hide all of training but
  the update.
- Further proposals have instances of one degree, beside each mesh of the front.

The proposals with the shortest bounds, one for each mesh, are predicted. From the best, the search climbs over the next
meshes, the next degrees, and two degrees that share the devices.

Spare devices go to the stage that they make faster.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from libra_jax import protocols
from libra_jax.planning.forecast import meshes, serving
from libra_jax.planning.forecast.serving import Demand
from libra_jax.planning.search import partition

PARTS = 128
"""Most places at which the requests may be cut; more if there are more devices."""

PARTS_A_DEVICE = 2

LOOKED_AT, BESIDE = 32, 2
"""Most splits in a picture, and how many of them are next to the best on either side."""

PREDICTED, CLIMBED = 3, 4
"""Meshes whose best proposals are predicted, and most steps from the best of them to its neighbours."""

ROUGH = 0.003
"""Share by which the bound of a mixture of degrees may be too long, for speed."""

SIZES = 24
"""Most numbers of devices that are tried for the sake of fewer devices."""

SURE = 2
"""Layouts that are predicted with care at the end: the best by rough predictions."""

BOUND = 0.03
"""Share by which a step may exceed a stage that is still said to set its length."""


class StepPredictor(Protocol):
    """Predicts steps."""

    def __call__(self, buckets: Sequence[protocols.PlannedBucket], train: meshes.Mesh, *, rough: bool) -> float:
        """Returns the seconds of a step.

        Args:
          buckets: the instances.
          train: the mesh, whose seconds are those of training and weight sync.
          rough: allows an error of some percent, for speed.
        """
        ...


@dataclass(frozen=True)
class DeviceSplit:
    """One way to split the devices, with the best use of each part.

    Attributes:
      train: the mesh.
      rollout: the instances.
      rollout_seconds: seconds of a training step's requests, a bound.
      step_seconds: predicted seconds of a step.
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


def front_of(
    training: meshes.Training,
    max_devices: int,
    *,
    mesh: tuple[int, int, int] | None = None,
    reach: int | None = None,
    host_devices: int = 1,
) -> tuple[meshes.Mesh, ...]:
    """Returns the meshes that a search chooses from, the fewest devices first.

    Args:
      training: times of meshes.
      max_devices: most devices that will be asked about.
      mesh: (data, fsdp, tensor) of the only possible mesh; None leaves it to the search.
      reach: most devices of a mesh that a running trainer can change to; None: any mesh.
      host_devices: devices of a host, of which larger meshes take all; 1: any number.

    Raises:
      ConfigError: the model fits on no mesh of `max_devices` devices; the message says what is short.
    """
    if mesh is not None:
        return (training.mesh(*mesh),)
    return training.front(
        min(max_devices, reach or max_devices), whole_rows=reach is not None, host_devices=host_devices
    )


class PlanSearch:
    """Splits of any number of devices for the same work.

    Args:
      rollout: times of instances.
      front: meshes to choose from (`front_of`).
      max_devices: most devices that will be asked about.
      staleness: max staleness.
      step: predicts the step of a layout.
      simpler: share of a step that each further degree has to save.
      host_devices: devices of a host if no host may both train and roll out; 1: any device may do either.

    Raises:
      ConfigError: a request fits on no instance; the message says what is short.
    """

    def __init__(
        self,
        rollout: serving.Serving,
        front: Sequence[meshes.Mesh],
        max_devices: int,
        *,
        staleness: int,
        step: StepPredictor,
        simpler: float = 0.0,
        host_devices: int = 1,
    ) -> None:
        self.demand: Demand = rollout.demand
        self._rollout = rollout
        self._staleness = staleness
        self._step = step
        self._simpler = simpler
        self._host_devices = host_devices
        self._front = tuple(front)
        edges = self.demand.edges(max(PARTS, PARTS_A_DEVICE * max_devices))
        self._partitions = partition.Partitions(rollout.seconds, edges, rollout.degrees)
        if math.isinf(self._partitions.least_seconds):
            raise protocols.ConfigError(
                f"no instance holds a context of {int(self.demand.peak.max())} tokens beside the weights, not even one "
                f"of tensor-parallel degree {max(rollout.degrees)}; lower rollout.max_context or take wider instances"
            )

    def weighed(self, ratio: float, besides: Callable[[int], float], step: StepPredictor) -> PlanSearch:
        """Returns the same search with training that takes `ratio` times as long, and `besides` of its devices on
        top. `step` predicts its steps."""
        # Shares the partitions, whose times are the costly part and do not change.
        search = copy.copy(self)
        search._step = step
        search._front = tuple(
            dataclasses.replace(
                mesh,
                seconds=ratio * mesh.seconds + besides(mesh.devices),
                early=ratio * mesh.early,
                part=ratio * mesh.part,
            )
            for mesh in self._front
        )
        return search

    def best(self, devices: int) -> DeviceSplit:
        """Returns the split of `devices` devices with the shortest step. Raises the errors of `ranked`."""
        return self.ranked(devices)[0]

    def ranked(self, devices: int) -> list[DeviceSplit]:
        """Returns the best splits of `devices` devices, at most `SURE`, the best first; at least one.

        Raises:
          ConfigError: they are too few to train and roll out; the message says how many each stage takes.
        """
        proposals = list(self._proposals(devices))
        if not proposals:
            assignment = self._partitions.within(partition.ANY_SECONDS)
            assert assignment is not None
            host_devices, train = self._host_devices, self._front[0].devices
            hosts = (
                f", in whole hosts of {host_devices} (config.cluster.accelerators_per_host)" if host_devices > 1 else ""
            )
            raise protocols.ConfigError(
                f"{devices} devices are too few: training takes at least {train} to hold the model "
                f"and its activations, and rollout at least {assignment.devices} more{hosts}; take "
                f"{host_devices * (math.ceil(train / host_devices) + math.ceil(assignment.devices / host_devices))} "
                "or more"
            )
        proposals.sort(key=lambda proposal: proposal.step_seconds)
        # Bounds of one mesh are near each other, and their errors alike.
        of_mesh = {proposal.train: proposal for proposal in reversed(proposals)}
        first = sorted(of_mesh.values(), key=lambda proposal: proposal.step_seconds)[:PREDICTED]
        splits = self._with_proposals([], first)
        # From the best of them to its neighbours, as long as these make the step shorter.
        tried = {(split.train, split.rollout) for split in splits}
        for _ in range(CLIMBED):
            best = splits[0]
            neighbours = [
                split for split in self._neighbours(best, devices) if (split.train, split.rollout) not in tried
            ]
            tried |= {(split.train, split.rollout) for split in neighbours}
            splits = self._with_proposals(splits, neighbours)
            if splits[0] is best:
                break
        return sorted((self._predict(split, rough=False) for split in splits[:SURE]), key=self._cost)

    def _rollout_devices(self, devices: int, mesh: meshes.Mesh) -> int:
        """Returns the devices beside a mesh that may roll out."""
        host_devices = self._host_devices
        return max(0, host_devices * (devices // host_devices - math.ceil(mesh.devices / host_devices)))

    def _with_proposals(self, splits: Sequence[DeviceSplit], proposals: Sequence[DeviceSplit]) -> list[DeviceSplit]:
        """Returns all of them, the best first. Those whose bound is no better than the best keep it unpredicted."""
        splits = list(splits)
        best = min(map(self._cost, splits), default=math.inf)
        for proposal in proposals:
            split = proposal if self._cost(proposal) >= best else self._predict(proposal)
            best = min(best, self._cost(split))
            splits.append(split)
        return sorted(splits, key=self._cost)

    def _cost(self, split: DeviceSplit) -> float:
        return split.step_seconds * (1.0 + self._simpler * len(split.rollout))

    def _neighbours(self, split: DeviceSplit, devices: int) -> Iterator[DeviceSplit]:
        """Yields the same degrees beside the next smaller and the next larger mesh, and other degrees on its mesh."""
        at, mesh = self._front.index(split.train), split.train
        neighbours = [*self._front[max(0, at - 1) : at], *self._front[at + 1 : at + 2]]
        neighbours = [neighbour for neighbour in neighbours if neighbour.seconds < split.step_seconds]
        degrees = [bucket.tensor_parallel for bucket in split.rollout]
        if len(degrees) == 1:
            narrow, same, wide = degrees[0] // 2, degrees[0], 2 * degrees[0]
            for chosen in ((narrow,), (wide,), (narrow, same), (same, wide)):
                yield from self._of_degrees(mesh, chosen, devices)
        else:
            alone = [item for degree in degrees for item in self._of_degrees(mesh, (degree,), devices)]
            yield min(alone, key=lambda item: item.rollout_seconds)
        for neighbour in neighbours:
            yield from self._of_degrees(neighbour, degrees, devices)
            if (
                len(degrees) > 1
                and (assignment := self._partitions.fastest(self._rollout_devices(devices, neighbour), precision=ROUGH))
                is not None
            ):
                yield self._split(neighbour, assignment)

    def _of_degrees(self, mesh: meshes.Mesh, degrees: Sequence[int], devices: int) -> Iterator[DeviceSplit]:
        """Yields the layout whose degrees have about equal parts of the devices beside a mesh, if there is one.

        Each degree gets the share of the tokens that it has of the devices, the widest those of the longest requests.
        """
        remaining_devices, buckets = self._rollout_devices(devices, mesh), list[protocols.PlannedBucket]()
        if remaining_devices < min(degrees) or not set(degrees) <= set(self._rollout.degrees):
            return
        if len(degrees) == 1:
            yield self._uniform_split(mesh, degrees[0], remaining_devices // degrees[0])
            return
        tokens, seconds, first, last = self.demand.sums["tokens"], 0.0, 0, 0
        share = tokens[-1] / remaining_devices
        for place in range(len(degrees), 0, -1):  # the widest first, so that the narrow ones get the rest
            degree = degrees[place - 1]
            count = remaining_devices // place // degree
            remaining_devices -= count * degree
            if not count or last == len(self.demand):
                return
            last = (
                len(self.demand) if place == 1 else int(np.searchsorted(tokens, tokens[first] + share * count * degree))
            )
            of_degree = self._rollout.seconds(degree, np.array([first]), np.array([last]), count)
            seconds = max(seconds, float(of_degree[0]))
            buckets.append(protocols.PlannedBucket(degree, count, math.ceil(self.demand.tokens[first])))
            first = last
        if math.isfinite(seconds):
            ranged = self._ascending(buckets[::-1])
            yield DeviceSplit(mesh, ranged, seconds, self._step_bound(mesh, seconds))

    def _proposals(self, devices: int) -> Iterator[DeviceSplit]:
        """Yields layouts with bounds of their steps."""
        mixed = self._mixed(devices)
        if mixed is not None:
            yield mixed
        for mesh in self._front:
            for degree in self._rollout.degrees:
                count = self._rollout_devices(devices, mesh) // degree
                if count > 0:
                    split = self._uniform_split(mesh, degree, count)
                    if math.isfinite(split.rollout_seconds):
                        yield split

    def _mixed(self, devices: int) -> DeviceSplit | None:
        """Returns the split with the shortest bound, whose degrees share the requests by length; None if none fits."""
        best: DeviceSplit | None = None
        if self._staleness:
            pair = partition.shortest(
                lambda limit: self._within(limit, devices),
                max(self._partitions.least_seconds, self._front[-1].seconds),
                partition.ANY_SECONDS,
                lambda pair: max(pair[0].seconds, pair[1].seconds),
                precision=ROUGH,
            )
            if pair is not None:
                # Neither stage needs the spare devices for this time, and the slower stage cannot use them, or it would
                # have been faster.
                spare = [item for item in self._front if self._rollout_devices(devices, item) >= pair[1].devices]
                mesh = max(spare, key=lambda item: item.devices)
                assignment = self._partitions.fastest(self._rollout_devices(devices, mesh), precision=ROUGH)
                best = self._split(mesh, assignment or pair[1])
        else:
            for mesh in self._front:
                # Rollout may take only as long as would still beat the best step.
                below = math.inf if best is None else best.step_seconds - (mesh.seconds - mesh.early)
                if self._rollout_devices(devices, mesh) < 1 or below <= 0:
                    continue
                assignment = self._partitions.fastest(self._rollout_devices(devices, mesh), below=below)
                if assignment is not None and assignment.seconds < below:
                    best = self._split(mesh, assignment)
        return best

    def _uniform_split(self, mesh: meshes.Mesh, degree: int, count: int) -> DeviceSplit:
        """Returns the split with `count` instances of one degree, with the bound of its step."""
        buckets = (protocols.PlannedBucket(degree, count, math.ceil(self.demand.tokens[0])),)
        seconds = self.rollout_seconds(buckets)
        return DeviceSplit(mesh, buckets, seconds, self._step_bound(mesh, seconds))

    def _step_bound(self, mesh: meshes.Mesh, rollout: float) -> float:
        """Returns the bound of a step."""
        after = 0.0 if self._staleness else mesh.seconds - mesh.early
        return max(mesh.seconds, after + rollout)

    def _predict(self, split: DeviceSplit, rough: bool = True) -> DeviceSplit:
        step = self._step(split.rollout, split.train, rough=rough)
        return dataclasses.replace(split, step_seconds=step, rollout_seconds=min(step, split.rollout_seconds))

    def cheapest(self, seconds: float, devices: int) -> DeviceSplit:
        """Returns the split with the fewest devices, `devices` at most, whose step takes no longer than `seconds`.

        Raises:
          ConfigError: there is none; the message says how long the shortest step takes.
        """
        cheapest = self.best(devices)
        if cheapest.step_seconds > seconds:
            raise protocols.ConfigError(
                f"no plan of {devices} devices takes a step in {seconds:g} s; the fastest takes "
                f"{cheapest.step_seconds:.1f}"
            )
        fewer = self._front[0].devices
        while cheapest.devices > fewer + 1:  # `fewer` devices are too few
            middle = (fewer + cheapest.devices) // 2
            split = self._best_of(middle)
            if split is not None and split.step_seconds <= seconds:
                cheapest = split
            else:
                fewer = middle
        return cheapest

    def thriftiest(self, devices: int) -> DeviceSplit:
        """Returns the split of at most `devices` devices with the fewest device-seconds a step: the most tokens for
        each device.

        Tries `SIZES` numbers of devices. Raises the errors of `ranked`.
        """
        splits = [self.best(devices)]
        for count in np.unique(np.geomspace(self._front[0].devices + 1, devices, SIZES).round().astype(int)):
            split = self._best_of(int(count))
            if split is not None:
                splits.append(split)
        return min(splits, key=lambda split: split.devices * split.step_seconds)

    def _best_of(self, devices: int) -> DeviceSplit | None:
        """Returns the best split of `devices` devices; None if they are too few."""
        try:
            return self.best(devices)
        except protocols.ConfigError:
            return None

    def splits(self, devices: int, near: DeviceSplit | None = None) -> Iterator[DeviceSplit]:
        """Yields meshes of the front with the best rollout on the remaining devices, fewest training devices first.

        Args:
          devices: devices of both stages.
          near: limits many meshes to those next to this split's, and some spread over the others, and stands for its
            mesh; None: all of them.
        """
        chosen = list(range(len(self._front)))
        if near is not None and len(chosen) > LOOKED_AT:
            at = self._front.index(near.train)
            neighbours = chosen[max(0, at - BESIDE) : at + BESIDE + 1]
            chosen = sorted({*neighbours, *chosen[:: -(-len(chosen) // (LOOKED_AT - len(neighbours)))]})
        for mesh in [self._front[index] for index in chosen]:
            if near is not None and mesh == near.train:
                yield near
                continue
            rollout_devices = self._rollout_devices(devices, mesh)
            assignment = self._partitions.fastest(rollout_devices) if rollout_devices > 0 else None
            if assignment is None:
                continue
            proposals = [self._split(mesh, assignment)]
            for degree in self._rollout.degrees:
                if rollout_devices // degree > 0:
                    proposals.append(self._uniform_split(mesh, degree, rollout_devices // degree))
            shortest_rollout = min(proposals, key=lambda split: split.rollout_seconds)
            best = min(map(self._predict, {proposals[0], shortest_rollout}), key=self._cost)
            yield self._predict(best, rough=False)

    def rollout_seconds(self, rollout: Sequence[protocols.PlannedBucket]) -> float:
        """Returns the seconds of a training step's requests on these instances, shared out in the best way; infinite
        if some fit none. Instances of one degree share them evenly."""
        if len(rollout) == 1:
            first, last = np.zeros(1, np.int64), np.full(1, len(self.demand))
            return float(self._rollout.seconds(rollout[0].tensor_parallel, first, last, rollout[0].count)[0])
        assignment = self._best_partition(rollout)
        return math.inf if assignment is None else assignment.seconds

    def ranges(self, rollout: Sequence[protocols.PlannedBucket]) -> tuple[protocols.PlannedBucket, ...]:
        """Returns the same instances with the length ranges that make the slowest instance fastest."""
        assignment = self._best_partition(rollout)
        if assignment is None:
            return tuple(rollout)
        bounds = {bucket.tensor_parallel: bucket.max_remaining_tokens for bucket in self._buckets(assignment)}
        return self._ascending(
            dataclasses.replace(bucket, max_remaining_tokens=bounds.get(bucket.tensor_parallel, 0))
            for bucket in rollout
        )

    def _best_partition(self, rollout: Sequence[protocols.PlannedBucket]) -> partition.RequestPartition | None:
        return self._partitions.over([bucket.tensor_parallel for bucket in rollout for _ in range(bucket.count)])

    @staticmethod
    def _ascending(buckets: Iterable[protocols.PlannedBucket]) -> tuple[protocols.PlannedBucket, ...]:
        """Returns the buckets with bounds that ascend; instances without work get the smallest possible range."""
        bounds, bound = [], 0
        for bucket in buckets:
            bound = max(bound + 1, bucket.max_remaining_tokens)
            bounds.append(dataclasses.replace(bucket, max_remaining_tokens=bound))
        return tuple(bounds)

    def _within(self, limit: float, devices: int) -> tuple[meshes.Mesh, partition.RequestPartition] | None:
        """Returns the mesh and the instances with the fewest devices that meet the limit; None if they need too
        many."""
        # The front is sorted by devices, so the first fast enough mesh is the smallest.
        mesh = next((item for item in self._front if item.seconds <= limit), None)
        if mesh is None or self._rollout_devices(devices, mesh) < 1:
            return None
        assignment = self._partitions.within(limit)
        return (
            (mesh, assignment)
            if assignment is not None and assignment.devices <= self._rollout_devices(devices, mesh)
            else None
        )

    def _split(self, mesh: meshes.Mesh, assignment: partition.RequestPartition) -> DeviceSplit:
        """Returns the split with the bound of its step."""
        buckets = self._buckets(assignment)
        seconds = self.rollout_seconds(buckets) if len(buckets) == 1 else assignment.seconds
        return DeviceSplit(mesh, buckets, seconds, self._step_bound(mesh, seconds))

    def _buckets(self, assignment: partition.RequestPartition) -> tuple[protocols.PlannedBucket, ...]:
        """Returns the runs by degree, the narrowest first; each degree's longest request bounds its bucket.

        If several degrees serve requests of one length, the wider degrees' bounds are a token more. The scheduler
        then chooses among them.
        """
        buckets: list[protocols.PlannedBucket] = []
        # Runs go from the longest requests to the shortest, buckets the other way.
        for degree, runs in itertools.groupby(reversed(assignment.runs), key=lambda run: run.degree):
            instance_runs = list(runs)
            longest = math.ceil(self.demand.tokens[instance_runs[-1].first])
            longest = max(longest, buckets[-1].max_remaining_tokens + 1) if buckets else longest
            buckets.append(protocols.PlannedBucket(degree, len(instance_runs), longest))
        return tuple(buckets)


def compared(best: DeviceSplit, splits: Sequence[DeviceSplit], staleness: int) -> str:
    """Explains in a sentence why the runner-up lost.

    Args:
      best: the split that won.
      splits: the splits that it is compared with.
      staleness: max staleness.
    """
    alternatives = [item for item in splits if item.train.devices != best.train.devices]
    if not alternatives:
        return "no other split fits"
    second = min(alternatives, key=lambda item: item.step_seconds)
    more = second.step_seconds / best.step_seconds - 1.0
    train, rollout_devices = second.train, second.plan.rollout_devices
    if staleness and second.step_seconds > (1.0 + BOUND) * max(train.seconds, second.rollout_seconds):
        # (path + training) / (staleness + 1) is the step's other bound (`pipeline`).
        path = (staleness + 1) * second.step_seconds - train.seconds
        reason = (
            f"neither stage is as long as that, but the longest rollouts take about {path:.1f} s on {rollout_devices} "
            f"devices, and with {train.seconds:.1f} s of training they have to fit into {staleness + 1} steps"
        )
    elif train.seconds > second.rollout_seconds:
        reason = f"training takes {train.seconds:.1f} s on {train.devices} devices"
    else:
        reason = f"rollout takes {second.rollout_seconds:.1f} s on the {rollout_devices} devices left"
    # The search stops at a precision, so the runner-up may even be shorter by less than the printed digits.
    longer = f"{100 * more:.1f}% longer" if more >= 0.0005 else "no shorter"
    return f"{train.devices} training devices would make the step {longer}: {reason}"
