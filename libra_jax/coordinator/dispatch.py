"""Samples tokens for the agent loop: turns the scheduler's decisions into streams of tokens from engines.

A request keeps every token that has streamed in. If its engine dies, hangs or aborts it, or if the scheduler moves it,
another engine continues from exactly those tokens. Tokens are never turned into text and back.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from libra_jax import deadlines, protocols
from libra_jax.coordinator import instances, routing

WATCHES = 8
"""Number of checks of each stream within its deadline. Waiting requests are checked equally often."""


@dataclass
class Counts:
    """Counts of the dispatcher since they were last taken.

    Attributes:
      tokens: tokens sampled for training groups.
      requests: segments of rollouts that made their first request.
      resumed: streams that failed and resumed.
      waited_seconds: seconds that requests of training groups waited for a slot, summed.
      stream_seconds: seconds that slots were in use, summed.
      seconds: seconds spent on scheduling decisions and book-keeping.
    """

    tokens: int = 0
    requests: int = 0
    resumed: int = 0
    waited_seconds: float = 0.0
    stream_seconds: float = 0.0
    seconds: float = 0.0


@dataclass
class _Rollout:
    """A rollout under way, with the requests of its segments in the order of their arrival."""

    trajectory: protocols.Trajectory
    group_id: int
    dispatch_version: int
    requests: list[routing.Request] = field(default_factory=list)


class Dispatcher:
    """The run's `protocols.Sampler`. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`rollout.generation_retries`, `deadlines.first_token`,
        `deadlines.placement`). The recorder gets a span for each stream and each tool call.
      scheduler: decides which instance serves a request.
      engines: the rollout instances.

    Attributes:
      counts: counts since `take_counts`.
      routing: record of moves between instances.
    """

    def __init__(
        self, run: protocols.RunContext, *, scheduler: protocols.Scheduler, engines: instances.Instances
    ) -> None:
        config = run.config
        self._retries = config.rollout.generation_retries
        self._deadline = config.deadlines.first_token
        self._patience = config.scheduler.ageing_seconds + config.deadlines.placement
        self._policy = config.scheduler.policy
        self._transfers = config.rollout.kv_transfer != "none"
        self._scheduler = scheduler
        self._engines = engines
        self._recorder = run.recorder
        self._clock = run.clock
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, routing.Request] = {}
        self._rollouts: dict[str, _Rollout] = {}
        self._streams = 0
        self.counts = Counts()
        self._counted_from = self._clock()
        self.routing = routing.Routing(config)
        run.events.subscribe(protocols.EnginesChanged, lambda event: self._instances_changed(event.serving))
        run.events.subscribe(protocols.EnginesReplanned, lambda event: self.replan(event.rollout))
        run.scope.start(self._watch(), "stream deadlines")

    def open(self, trajectory: protocols.Trajectory, group_id: int, dispatch_version: int) -> None:
        """Registers a rollout of the group. `finish` undoes this."""
        self._rollouts[trajectory.trajectory_id] = _Rollout(trajectory, group_id, dispatch_version)

    def finish(self, trajectory_id: str) -> None:
        """Frees the slots of a rollout that completed, failed or was aborted."""
        rollout = self._rollouts.pop(trajectory_id, None)
        if rollout is None:
            return
        completed = rollout.trajectory.finish is not None
        trained = completed and rollout.group_id != protocols.EVALUATION_GROUP
        if trained and rollout.requests:
            rollout.trajectory.metrics["moves"] = float(sum(len(each.route.moves) for each in rollout.requests))
        # Children first, so that the scheduler never holds a segment whose parent it has forgotten.
        for request in reversed(rollout.requests):
            del self._requests[request.name]
            now = self._clock()
            request.displace()
            if trained:
                self.routing.finished(request.route, request.generated)
                for turn, move in request.route.moves:
                    # A turn that brought no token has no entry.
                    if turn < len(request.segment.turns):
                        request.segment.turns[turn].moves += (move,)
            self._apply(self._scheduler.on_finish(request.name, request.generated, now, completed=completed), now)

    def take_counts(self) -> Counts:
        """Returns the counts since the last call, and starts new ones."""
        now = self._clock()
        for request in self._requests.values():
            if request.waits:
                self._count_wait(request)
            if request.stream is not None:
                self.counts.stream_seconds += now - max(request.stream.begin, self._counted_from)
        self._counted_from = now
        counts, self.counts = self.counts, Counts()
        return counts

    def _count_wait(self, request: routing.Request) -> None:
        now = self._clock()
        if request.group_id != protocols.EVALUATION_GROUP:
            self.counts.waited_seconds += now - request.waits_since
        request.waits_since = now

    async def sample(
        self,
        segment: protocols.Segment,
        sampling: protocols.SamplingParams,
        heard: Callable[[], None] | None = None,
    ) -> protocols.FinishReason:
        """Samples one turn (`protocols.Sampler.sample`).

        Raises:
          WorkerLost: the request failed more than `rollout.generation_retries` times.
        """
        # A request lives from its segment's first turn to the rollout's end, so later turns find it here.
        request = self._requests.get(segment.name)
        if request is None:
            now = self._clock()
            rollout = self._rollouts[segment.trajectory_id]
            request = routing.Request(segment, rollout.group_id, segment.generated_tokens)
            self._requests[request.name] = request
            rollout.requests.append(request)
            self.counts.requests += 1
            info = protocols.RequestInfo(
                request_id=request.name,
                prompt_id=segment.prompt_id,
                group_id=rollout.group_id,
                context_tokens=segment.context_tokens,
                generated_tokens=request.generated,
                dispatch_version=rollout.dispatch_version,
                parent=segment.parent.name if segment.parent is not None else "",
                shared_tokens=segment.shared,
                rollout_id=segment.trajectory_id,
                segment=segment.index,
            )
            self._apply(self._scheduler.on_arrival(info, now), now)
        request.heard, start = heard, len(segment.token_ids)
        while True:
            # An engine may die after the turn's last token and before it sends the reason.
            sampled = len(segment.token_ids) - start
            if sampled and segment.token_ids[-1] in sampling.stop_token_ids:
                return "stop"
            if sampled >= sampling.max_tokens:
                return "length"
            if not request.instance:
                request.waits, request.waits_since = True, self._clock()
                try:
                    # The request may lose its place again before it wakes.
                    while not request.instance:
                        await request.placed.wait()
                finally:
                    # A cancelled request waits no more, so the watch must not count it as passed over.
                    self._count_wait(request)
                    request.waits = False
            # Tokens of a broken stream count towards the turn's budget.
            finish = await self._stream(request, replace(sampling, max_tokens=sampling.max_tokens - sampled))
            if finish is not None:
                return finish

    async def tool_called(self, segment: protocols.Segment) -> None:
        """Frees the request's slot during a tool call (`protocols.Sampler.tool_called`)."""
        request = self._requests.get(segment.name)
        # A rollout that replays its past after a restart has no request yet.
        if request is not None:
            now = request.away_since = self._clock()
            request.displace()
            self._apply(self._scheduler.on_tool_call(request.name, request.generated, now), now)

    async def tool_returned(self, segment: protocols.Segment, causal_state: protocols.CausalState) -> None:
        """Queues the request for its next turn (`protocols.Sampler.tool_returned`)."""
        request = self._requests.get(segment.name)
        if request is not None:
            now = self._clock()
            self._recorder.span("tools", causal_state.tool, request.away_since, now, {"request": request.name})
            context = segment.context_tokens
            self.routing.returned(request.route, request.generated)
            self._apply(self._scheduler.on_tool_return(request.name, causal_state, context, now), now)

    def _apply(self, placements: Sequence[protocols.Placement], since: float) -> None:
        """Carries out placements. `since` is the time at which the scheduler was called, for `Counts.seconds`."""
        for placement in placements:
            request = self._requests[placement.request_id]
            if not placement.instance:
                request.displace()
                continue
            # A move ends the stream. `sample` then opens one on the new instance, with the tokens so far.
            if request.stream is not None and request.stream.engine.name != placement.instance:
                request.stream.end()
            request.instance = placement.instance
            request.passed_over_since = None
            request.placed.set()
            self.routing.decided(request.route, placement)
        self.counts.seconds += self._clock() - since

    def _instances_changed(self, serving: Sequence[protocols.Instance]) -> None:
        names = {instance.name for instance in serving}
        for request in self._requests.values():
            if request.instance and request.instance not in names:
                request.displace()
        now = self._clock()
        self.routing.instances(serving)
        self._apply(self._scheduler.on_instance_change(serving, now), now)

    def replan(self, rollout: Sequence[protocols.PlannedBucket]) -> None:
        """Switches to a plan's buckets. Requests of instances that ended by the same plan wait for a new placement."""
        self._instances_changed(self._engines.serving())
        now = self._clock()
        self.routing.replan(rollout)
        self._apply(self._scheduler.on_plan(rollout, now), now)

    async def _stream(
        self, request: routing.Request, sampling: protocols.SamplingParams
    ) -> protocols.FinishReason | None:
        """Streams tokens from the request's instance. Returns the finish reason, or None to resume elsewhere."""
        engine, begin = self._engines.engines[request.instance], self._clock()
        stream = routing.Stream(engine, engine.life, self._loop.create_future(), begin, begin)
        request.stream = stream
        before = request.generated
        self.routing.served(request.route, len(request.segment.turns), request.segment.context_tokens)
        pump = self._loop.create_task(self._pump(request, stream, sampling))
        # Once the pump is done, every token has arrived.
        pump.add_done_callback(lambda _: stream.end())
        try:
            await stream.broken
        finally:
            # A hung engine may never answer the cancellation, so the stream is closed and the pump is left behind.
            stream.closed, request.stream = True, None
            deadlines.abandon(pump)
            self.counts.stream_seconds += self._clock() - max(begin, self._counted_from)
            arguments = {"request": request.name, "tokens": request.generated - before}
            self._recorder.span(engine.name, "generate", begin, self._clock(), arguments)
        error = pump.exception() if pump.done() else stream.broken.result()
        if error is None:
            return stream.finish
        if isinstance(error, protocols.WorkerLost):
            self._engines.lost(engine, stream.life, error)
        # A wrong config fails on every engine, so a retry is useless.
        elif isinstance(error, protocols.ConfigError):
            raise error
        request.failures += 1
        self.counts.resumed += 1
        if request.failures > self._retries:
            raise protocols.WorkerLost(
                f"Request {request.name} failed {request.failures} times, which is more than "
                f"config.rollout.generation_retries = {self._retries}; the last time: {error}"
            )
        return stream.finish

    async def _pump(self, request: routing.Request, stream: routing.Stream, sampling: protocols.SamplingParams) -> None:
        self._streams += 1
        asked = protocols.GenerationRequest(
            # Unique per stream: an engine may still be aborting this request's last one.
            request_id=f"{request.name}#{self._streams}",
            token_ids=request.segment.context(),
            sampling=sampling,
            routed_tokens=request.segment.routed_tokens,
        )
        if self._transfers and request.route.move is not None:
            asked = replace(asked, kv_source=await self._kv_source(request.route.move, stream, asked))
        if stream.engine.client is None:
            raise protocols.WorkerLost(f"{stream.engine.name} was lost before {request.name} began there")
        async with contextlib.aclosing(stream.engine.client.generate(asked)) as deltas:
            async for delta in deltas:
                if stream.closed:
                    return
                now = stream.last_delta = self._clock()
                if not stream.answered:
                    stream.answered = True
                    # A life with a token clears the fault, so that another restart makes sense.
                    stream.engine.answered_life, stream.engine.fault = stream.life, ""
                    stream.engine.answered = stream.engine.answered or now
                    self.routing.answered(request.route, now - stream.begin)
                request.segment.append_sampled(delta)
                request.generated += len(delta.token_ids)
                if request.heard is not None:
                    request.heard()
                if request.group_id != protocols.EVALUATION_GROUP:
                    self.counts.tokens += len(delta.token_ids)
                if delta.finish_reason == "abort":
                    raise protocols.LibraError(f"engine {stream.engine.name} aborted {request.name}")
                if delta.finish_reason is not None:
                    stream.finish = delta.finish_reason
                    return
                self._apply(self._scheduler.on_progress(request.name, request.generated, now), now)
        raise protocols.WorkerLost(f"the stream of {request.name} from {stream.engine.name} ended without a finish")

    async def _kv_source(
        self, move: protocols.Move, stream: routing.Stream, asked: protocols.GenerationRequest
    ) -> Mapping[str, Any] | None:
        """Keys and values that the instance before keeps for this one; None where they have to be computed again."""
        source, version = self._engines.engines.get(move.source), stream.engine.policy_version
        if source is None or source.client is None or source.policy_version != version:
            return None
        client, life = source.client, source.life
        try:
            kept = await client.hand_over(asked)
        except protocols.WorkerLost as error:
            self._engines.lost(source, life, error)
            return None
        # Not an error of the run: the new instance computes them, and routing/transferred stays below routing/moves.
        except protocols.LibraError:
            return None
        # A weight sync came between: the cache is of older weights.
        if not version == source.policy_version == stream.engine.policy_version:
            return None
        self.routing.counts.transferred += 1
        return kept

    async def _watch(self) -> None:
        """Watches for streams without tokens, and for requests passed over, beyond their deadlines."""
        interval = self._deadline / WATCHES
        while True:
            before = self._clock()
            await asyncio.sleep(interval)
            now = self._clock()
            streams = [(item, item.stream) for item in self._requests.values() if item.stream is not None]
            # This process stalled, not the engines: shift all deadlines by the stall.
            if now - before >= 2 * interval:
                for _, stream in streams:
                    stream.last_delta += now - before
                for request in self._requests.values():
                    if request.passed_over_since is not None:
                        request.passed_over_since += now - before
                continue
            self._check_waiting(now)
            for request, stream in streams:
                # A weight update freezes decoding, which is no fault of the engine.
                if stream.engine.paused:
                    stream.last_delta = now
                elif now - stream.last_delta >= self._deadline:
                    error = protocols.DeadlineMissed(
                        f"Engine {stream.engine.name} sent no token of {request.name} for {self._deadline:g} s "
                        "(config.deadlines.first_token)."
                    )
                    # If every stream of the engine stands still, the engine hangs; otherwise only this stream does.
                    peers = [other for _, other in streams if other.engine is stream.engine]
                    if all(now - other.last_delta >= self._deadline for other in peers):
                        self._engines.lost(stream.engine, stream.life, error)
                    stream.end(error)

    def _check_waiting(self, now: float) -> None:
        """Ends the run if a request waits beyond its deadline although some instance always had a free slot."""
        free, overdue = self._free(), []
        for request in self._requests.values():
            if not request.waits or request.instance or not free:
                request.passed_over_since = None
            elif request.passed_over_since is None:
                request.passed_over_since = now
            elif now - request.passed_over_since >= self._patience:
                overdue.append(request)
        if not overdue:
            return
        # A scheduler updates ageing only at events, and the last event may be long ago: give it one before the verdict.
        self._apply(self._scheduler.on_instance_change(self._engines.serving(), now), now)
        left, free = [request for request in overdue if not request.instance], self._free()
        if left and free:
            raise protocols.DeadlineMissed(
                f"Request {left[0].name} was given no place for {now - (left[0].passed_over_since or now):.0f} s, in "
                f"which {free[0]} or another instance always had a free slot: scheduler.policy {self._policy!r} does "
                "not place it; choose another, or raise config.deadlines.placement (beyond scheduler.ageing_seconds)."
            )

    def _free(self) -> list[str]:
        """Returns the names of the instances with a free slot."""
        taken = collections.Counter(request.instance for request in self._requests.values())
        return [instance.name for instance in self._engines.serving() if taken[instance.name] < instance.slots]
