"""C-MLFQ: buckets by expected cost, under all the evidence there is; and the rule as it was published.

A training step waits for its last groups, so what counts is not the mean time to finish but its upper tail. `Cmlfq`
charges a request that needs an instance, for the instance that holds its context and for each bucket that has room,

  E[(elapsed + wait + move + R s(n + 1)) ^ p]  +  what its presence adds to the same sum over the n requests there.

R is its remaining tokens (a distribution), s(n) the seconds a token takes with n requests decoding, p
the argument `tail_power`. The request goes to the cheapest bucket. With p > 1 a long request is worth more speed than a
short one. A short one keeps off an instance where long ones decode, although it would finish sooner there: wide
instances serve the tail, and nothing else while the tail needs them. If no slot is free, a request waits for the
instance that holds its context: pricing the wait for the other buckets as well was tried and gained nothing.

The feedback half: a request that outruns its bucket's budget, in tokens since its last decision, is judged again at
that point, on what is left of its distribution. It moves if another bucket has become cheaper and has room.

An instance takes no more requests than its key-value cache is expected to hold (`residents.py`). If contexts outgrow
the cache all the same, a request that returns from a tool waits for room anywhere.

A request is one segment of a rollout: elapsed seconds are those of the rollout, remaining tokens those of the segment.
A segment that was not served yet belongs where its parent's context is: elsewhere, what it shares is prefilled once
more, and that is its cost of a move. Where little is shared, it goes wherever a new request would. While a segment
waits or decodes, those of its rollout that are away are no residents. They decode later, after their sub-agents, or
never, after a summary. A segment that comes back is priced like a new request, whose context lies where it was served.

Free slots whose own queue is empty serve other requests: those of the nearest bucket, then those of the most crowded
instance. But a request waits on for its bucket while that costs it less than a turn at the other's pace, for
`scheduler.ageing_seconds` at most.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import buckets, requests, residents
from libra_jax.scheduling import costs as cost_model
from libra_jax.scheduling.prediction import evidence, paths, prefix_tree

TURN_SHARE = 0.02
"""Weight of the latest turn in the mean length of a turn."""

READ_TOKENS = 500.0
"""Generated tokens as much as which the run's mean counts, in what a request reads for each token that it generates."""

READ_SHARE = 0.01
"""Weight of the latest finished request in that mean."""


class Cmlfq(residents.ResidentScheduler):
    """The cost rule of the module.

    Args:
      costs: costs of decoding and moving.
      kinds: kinds of the layout's instances, if they are known.
      tail_power: exponent of the time to finish in the cost; 1 is mean latency, more weighs the tail.
      move_margin: cost of a move, as a multiple of its seconds; above 1, as loads even out before it has paid off.
    """

    by_length = True
    by_cache = True
    counts_residents = True
    predicts = True
    overflow_every = 4  # a look at all queues costs more than most events, and can wait for a few of them

    masses: tuple[float, ...] = prefix_tree.MASSES
    """Probability mass of each point of what `expect` returns."""

    def __init__(
        self,
        config: config_lib.SchedulerConfig,
        costs: cost_model.Costs,
        *,
        kinds: Sequence[protocols.Kind] = (),
        tail_power: float = 4.0,
        move_margin: float = 8.0,
    ) -> None:
        self.evidence = evidence.Evidence(config)
        self.rates = cost_model.CostRates(costs)
        super().__init__(
            config,
            order="group_completion",
            kinds=kinds,
            learner=self.evidence,
            # Context makes an instance's tokens slow, more than the number of its requests does.
            busy=operator.attrgetter("context"),
        )
        self._turn_tokens = 256.0  # mean tokens of a turn
        self._reading = 0.0  # tokens read for each generated one, mean of finished requests
        self._urgency = 0.0  # of the request that `_cost` priced last
        self._power = tail_power
        self._move_margin = move_margin

    def expect(self, request: requests.LiveRequest) -> prefix_tree.Sketch:
        """Returns the distribution of the tokens still to be generated: a number for each of `masses`."""
        track = request.track
        assert track is not None
        return self.evidence.predict(track, request.generated_tokens)

    def on_instance_change(self, instances: Sequence[protocols.Instance], now: float) -> list[protocols.Placement]:
        self.rates.clear()  # costs may have been calibrated since
        return super().on_instance_change(instances, now)

    def _rebuild(self, instances: Sequence[protocols.Instance]) -> None:
        super()._rebuild(instances)
        # Among like accelerators it was measured to gain nothing, so there it is left out of the price.
        unlike = len({server.instance.accelerator for server in self.servers.values()}) > 1
        for server in self.servers.values():
            server.rates = self.rates.rate_table(server.instance.kind)
            server.read = self.rates.read(server.instance) if unlike else 0.0

    def on_tool_call(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        turn_tokens = generated_tokens - self.requests[request_id].turn_start
        self._turn_tokens += TURN_SHARE * (turn_tokens - self._turn_tokens)
        return super().on_tool_call(request_id, generated_tokens, now)

    def on_finish(
        self, request_id: str, generated_tokens: int, now: float, *, completed: bool = True
    ) -> list[protocols.Placement]:
        request = self.requests[request_id]
        # Held-out tasks must not teach, as in `slots`.
        if completed and generated_tokens and request.group_id != protocols.EVALUATION_GROUP:
            self._reading += READ_SHARE * (request.read_tokens / generated_tokens - self._reading)
        return super().on_finish(request_id, generated_tokens, now, completed=completed)

    def on_progress(self, request_id: str, generated_tokens: int, now: float) -> list[protocols.Placement]:
        """Judges a request again that has outrun its bucket's budget, and moves it if that pays."""
        request = self.requests[request_id]
        server = request.server
        request.generated_tokens = generated_tokens
        if generated_tokens < request.mark or server is None or len(self.buckets) == 1:
            return []
        self.route(request, now)
        target, request.target = request.target, None
        if target is None or target is server:
            self.account(request, server)  # what is known of it has changed
            return []
        if target.full or not self.admits(request, target):
            return []  # a decoding request never gives its place up to wait
        self.withdraw(request)
        return [self.seat(request, target, protocols.MoveReason.BUDGET_OUTRUN), *self.place(now)]

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        anchor = request.anchor
        if anchor is not None and self._room_share:
            # Without room beside the present requests it was pushed out.
            needed = anchor.context + (request.inherited or request.context_tokens)
            if 0 < anchor.instance.cache_tokens < needed:
                request.anchor, request.context_at, request.inherited = None, "", 0
        if returned:
            self.leave_full(request)
        points = self.expect(request)
        request.remaining = sum(map(operator.mul, points, self.masses))
        level = self._cheapest(request, points, now)
        bounds = self.levels.bounds
        if bounds:  # its budget: it is judged again once it has generated as much again as its bucket is for
            request.mark = request.generated_tokens + bounds[min(level, len(bounds) - 1)]
        return level

    def pick(self, request: requests.LiveRequest, bucket: buckets.Bucket) -> buckets.InstanceQueue:
        home = request.home
        if home is None and request.anchor is not None and self.admits(request, request.anchor):
            home = request.anchor
        return bucket.least_busy() if home is None or home.level != bucket.level or home.full else home

    def serves(self, bucket: buckets.Bucket, request: requests.LiveRequest) -> bool:
        """Returns whether waiting costs the request more than a turn at this bucket's pace, and the move there."""
        level_bucket, target = self.buckets[request.level], request.target
        server = bucket.least_busy()
        if not self.admits(request, server):
            return False
        context = cost_model.rounded(request.inherited or request.context_tokens)
        move = self._move_margin * self.rates.move(request.context_at, server.instance, context)
        here = self._pace(server, server.residents + 1, request.context_tokens)
        if target is not None:
            waited_for, queue, count = target, target.queue.size, target.instance.slots
        else:
            waited_for, queue, count = level_bucket.servers[0], level_bucket.queue.size, level_bucket.slots
        # A slot that is waited for comes free on a full instance, so its pace is the one of all slots.
        there = self._pace(waited_for, waited_for.instance.slots, 0)
        wait = queue * self._turn_tokens * there / count
        # The prefill of a moved context holds up everybody who decodes there.
        cost = self._turn_tokens * (here - there) + move * (1 + server.residents)
        if wait > cost:
            request.gain = wait - cost
        return wait > cost

    # Costs.

    def _cheapest(self, request: requests.LiveRequest, points: prefix_tree.Sketch, now: float) -> int:
        """Returns the level of the cheapest bucket.

        Sets `request.target` to the instance in it if the request is to go to that one, `request.urgency`, and
        `request.gain` if a bucket is cheaper than home.
        """
        elapsed = now - request.rollout.arrived  # of the rollout: a step waits for all of its segments
        home, anchor = request.home, request.anchor
        best, level = float("inf"), request.level
        stay = best
        request.target = request.gain = None
        if home is not None:
            wait = 0.0
            if request.server is None and home.load >= home.slots:
                wait = self._wait_at(home.queue.ahead(request), home, home.slots)
            for bucket in self.buckets:
                if bucket.free > 0:
                    break
            else:  # no slot is free: it stays where its context is, at any cost, and only its urgency is asked for
                start, exponent = elapsed + wait, self._power - 1.0
                pace = self._pace(home, home.residents, request.context_now - request.home_account[0])
                urgency = 0.0
                for tokens, mass in zip(points, self.masses):  # noqa: B905 (equally many)
                    urgency += mass * (start + tokens * pace) ** exponent
                request.target, request.urgency = home, self._power * urgency
                return home.level
            best = stay = self._cost(request, home, points, elapsed, wait)
            level, request.target = home.level, home
            urgency = self._urgency
        elif anchor is not None:
            # Priced as the others are, with the wait for a slot: it may hold little of the context.
            wait = 0.0
            if anchor.full or not self.admits(request, anchor):
                wait = self._wait_at(anchor.queue.ahead(request), anchor, anchor.slots)
            best = stay = self._cost(request, anchor, points, elapsed, wait)
            level, request.target = anchor.level, anchor
            urgency = self._urgency
        for bucket in self.buckets:
            if not bucket.slots:
                continue
            server, wait, roomy = bucket.servers[0], 0.0, False
            if bucket.free > 0:
                server = bucket.least_busy()
                if server is home or server is anchor:
                    continue
                roomy = self.admits(request, server)
            if not roomy:
                if home is not None:
                    continue  # its own place comes free as soon as another, and has its context
                wait = self._wait_at(bucket.queue.ahead(request), server, bucket.slots)
            cost = self._cost(request, server, points, elapsed, wait)
            if cost < best:
                best, level, urgency = cost, bucket.level, self._urgency
                request.target = server if roomy else None
        if best < float("inf"):
            request.urgency = urgency
        if best < stay < float("inf"):  # the p-th roots are seconds
            request.gain = stay ** (1.0 / self._power) - best ** (1.0 / self._power)
        return level

    def _wait_at(self, ahead: float, server: buckets.InstanceQueue, count: int) -> float:
        """Returns seconds until a slot comes free for a request with `ahead` before it, `count` slots turning over."""
        return (ahead + 1.0) * self._turn_tokens * self._pace(server, server.residents, 0) / count

    def _pace(self, server: buckets.InstanceQueue, decoding: int, joining: int) -> float:
        """Returns seconds a token with `decoding` requests on the server and `joining` more tokens of context there.

        What the requests read between their turns holds all of them up: of each, the run's mean is expected.
        """
        # Requests beyond the slots wait, and slow no one.
        decoding = 1 if decoding < 1 else server.slots if decoding > server.slots else decoding
        context = (server.context + joining) // decoding
        shift = context.bit_length() - 3  # `costs.rounded`, without the call: this is the innermost function
        if shift > 0:
            context = context >> shift << shift
        pace = server.rates.get(decoding << cost_model.CONTEXT_BITS | context)  # `costs.packed`
        if pace is None:
            pace = self.rates.decode(server.instance, decoding, context)
        read = server.read
        return pace + decoding * self._reading * read if read else pace

    def _more_read(self, request: requests.LiveRequest) -> float:
        """Returns how many tokens more than the mean the request reads for each token that it generates."""
        generated = request.turn_start
        return (request.read_tokens - self._reading * generated) / (READ_TOKENS + generated)

    def _cost(
        self,
        request: requests.LiveRequest,
        server: buckets.InstanceQueue,
        points: prefix_tree.Sketch,
        elapsed: float,
        wait: float,
    ) -> float:
        """Returns expected seconds to the power p: the request's own, and what it adds to those of the requests there.

        Leaves in `_urgency` what a second would cost that the request lost there.
        """
        power, context = self._power, request.context_now
        here = request.home is server
        other_residents = server.residents - here
        # At home its context is in the sum already, as of its last account: only the growth since then joins.
        pace = self._pace(server, other_residents + 1, context - request.home_account[0] if here else context)
        # A segment that was not served yet moves what it shares with its parent; the rest is computed anywhere.
        moved = cost_model.rounded(request.inherited or context)
        seconds_to_move = self.rates.move(request.context_at, server.instance, moved)
        # A move costs several times its seconds: loads even out by themselves before it has paid off.
        move = self._move_margin * seconds_to_move
        if server.read:
            pace += self._more_read(request) * server.read
            move += request.unread * server.read
        start = elapsed + wait + move
        own_cost = urgency = shared = 0.0
        theirs = server.urgent_tokens / server.urgency if server.urgency > 0 else 0.0
        exponent = power - 1.0
        for tokens, mass in zip(points, self.masses):  # noqa: B905 (equally many)
            seconds = start + tokens * pace
            weight = mass * seconds**exponent
            own_cost += weight * seconds
            urgency += weight
            shared += mass * (tokens if tokens < theirs else theirs)  # tokens for which both decode there
        self._urgency = power * urgency
        if not other_residents:
            return own_cost
        # What the others lose: the difference of the paces with and without it, and its prefill.
        slower = pace - self._pace(server, other_residents, -request.home_account[0] if here else 0)
        return own_cost + server.urgency * (max(0.0, slower) * shared + move)


class CmlfqPaper(residents.ResidentScheduler):
    """C-MLFQ as published (arXiv 2606.03077, section 4): one jump to the bucket on which mean and P90 agree.

    A request starts in the narrowest bucket. At a tool return the deepest known node of its path is looked up. If the
    mean and the 90th percentile of the remaining tokens there ask for the same bucket, the request goes there.
    Otherwise it stays, and waits for the instance that holds its context. If the narrowest bucket is full, a new
    request starts in the nearest that is not: it has no context yet that a wait could spare. So a slot may idle only
    while requests wait for their own context, and none waits longer than `scheduler.ageing_seconds` for a free one.
    """

    by_length = True

    def __init__(self, config: config_lib.SchedulerConfig, *, kinds: Sequence[protocols.Kind] = ()) -> None:
        self.paths = paths.PathStatistics(config)
        super().__init__(config, kinds=kinds, learner=self.paths)

    def route(self, request: requests.LiveRequest, now: float, *, returned: bool = False) -> int:
        assert request.track is not None
        if returned and (node := self.paths.deepest_node(request.track)) is not None:
            request.remaining = node.mean
            level = self.levels.of_length(node.mean)
            # The published test of certainty: a spread that crosses a bound says nothing of the bucket.
            if level == self.levels.of_length(node.quantile(0.9)):
                request.level = level
        level = min(request.level, len(self.buckets) - 1)
        request.target = self.home(request, level)
        return level

    def serves(self, bucket: buckets.Bucket, request: requests.LiveRequest) -> bool:
        # Only a new request holds no cache anywhere, so only it may start in another bucket at no cost.
        return not request.served_by

    def seat(
        self, request: requests.LiveRequest, server: buckets.InstanceQueue, reason: protocols.MoveReason
    ) -> protocols.Placement:
        # Wherever it was placed, it stays until the statistics agree on another bucket.
        request.level = server.level
        return super().seat(request, server, reason)
