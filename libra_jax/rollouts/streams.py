"""Samples tokens for the agent loop: turns placements into streams of tokens from engines.

A request keeps every token that has streamed in. If its engine dies, hangs or aborts it, or if the scheduler moves it,
another engine continues from exactly those tokens. Tokens are never turned into text and back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from libra_jax import protocols
from libra_jax.rollouts import moves
from libra_jax.utils import deadlines, run_context

WATCHES = 8
"""Number of checks of each stream within its deadline."""


@dataclass
class EngineStream:
    """One engine's answer to one request, while the answer streams.

    `broken` ends the stream. It resolves after the pump has ended, or early: with the stream's error, or with None if
    the request was moved or displaced.
    """

    engine: protocols.StreamEngine
    life: int
    broken: asyncio.Future[BaseException | None]
    begin: float
    last_delta: float
    answered: bool = False
    closed: bool = False
    finish: protocols.FinishReason | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream, if it has not ended."""
        if not self.broken.done():
            self.broken.set_result(error)


@dataclass
class SegmentRequest:
    """A segment between its first and its last token.

    Attributes:
      ask: number of its tool returns, by which late placements are told apart.
      away: True while its tool runs.
      instance: where it decodes; empty while it waits or its tool runs.
      waits: True while it asks for tokens and has no instance.
      waits_since: start of the wait that is not in the counts yet.
      has_instance: set while it has an instance.
      on_tokens: called at new tokens.
    """

    segment: protocols.Segment
    group_id: int
    generated: int
    ask: int = 0
    away: bool = False
    instance: str = ""
    waits: bool = False
    waits_since: float = 0.0
    has_instance: asyncio.Event = field(default_factory=asyncio.Event)
    stream: EngineStream | None = None
    on_tokens: Callable[[], None] | None = None
    route: moves.Route = field(default_factory=moves.Route)
    failures: int = 0
    away_since: float = 0.0

    @property
    def name(self) -> str:
        """Name of the request: the segment's."""
        return self.segment.name

    def displace(self) -> None:
        """Takes the request off its instance: its stream ends, and the next one waits for a placement."""
        self.instance = ""
        # Cleared before the stream ends: `sample` looks at it next.
        self.has_instance.clear()
        if self.stream is not None:
            self.stream.end()


@dataclass
class _StreamingRollout:
    """A rollout under way, with the requests of its segments in the order of their arrival."""

    trajectory: protocols.Trajectory
    group_id: int
    dispatch_version: int
    requests: list[SegmentRequest] = field(default_factory=list)


class Streams(protocols.Sampler, protocols.PlacementSink):
    """The run's `protocols.Sampler`. Create it inside the event loop that it serves.

    Args:
      run: what the parts of the run share (`rollout.generation_retries`, `deadlines.first_token`). The recorder gets a
        span for each stream and each tool call.
      dispatcher: places the requests.
      engines: the rollout instances.

    Attributes:
      counts: counts since `take_counts`.
    """

    def __init__(
        self, run: run_context.RunContext, *, dispatcher: protocols.Dispatch, engines: protocols.StreamEngines
    ) -> None:
        config = run.config
        self._retries = config.rollout.generation_retries
        self._deadline = config.deadlines.first_token
        self._dispatcher = dispatcher
        self._engines = engines
        self._recorder = run.recorder
        self._clock = run.clock
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, SegmentRequest] = {}
        self._rollouts: dict[str, _StreamingRollout] = {}
        self._streams = 0
        self.counts = protocols.StreamCounts()
        self._counted_from = self._clock()
        run.scope.start(self._watch(), "stream deadlines")

    def open(self, trajectory: protocols.Trajectory, group_id: int, dispatch_version: int) -> None:
        """Registers a rollout of the group. `finish` undoes this."""
        self._rollouts[trajectory.trajectory_id] = _StreamingRollout(trajectory, group_id, dispatch_version)

    def finish(self, trajectory_id: str) -> None:
        """Frees the slots of a rollout that completed, failed or was aborted."""
        rollout = self._rollouts.pop(trajectory_id, None)
        if rollout is None:
            return
        completed = rollout.trajectory.finish is not None
        trained = completed and rollout.group_id != protocols.EVALUATION_GROUP
        if trained and rollout.requests:
            rollout.trajectory.metrics["moves"] = float(sum(len(request.route.moves) for request in rollout.requests))
        # Children first, so that the scheduler never holds a segment whose parent it has forgotten.
        for request in reversed(rollout.requests):
            del self._requests[request.name]
            request.displace()
            for turn, move in request.route.moves if trained else ():
                # A turn that brought no token has no entry.
                if turn < len(request.segment.turns):
                    request.segment.turns[turn].moves += (move,)
            self._dispatcher.finished(request.name, request.generated, completed=completed)

    def take_counts(self) -> protocols.StreamCounts:
        """Returns the counts since the last call, and starts new ones."""
        now = self._clock()
        for request in self._requests.values():
            if request.waits:
                self._count_wait(request)
            if request.stream is not None:
                self.counts.stream_seconds += now - max(request.stream.begin, self._counted_from)
        self._counted_from = now
        counts, self.counts = self.counts, protocols.StreamCounts()
        return counts

    def _count_wait(self, request: SegmentRequest) -> None:
        now = self._clock()
        if request.group_id != protocols.EVALUATION_GROUP:
            self.counts.waited_seconds += now - request.waits_since
        request.waits_since = now

    async def sample(
        self,
        segment: protocols.Segment,
        sampling: protocols.SamplingParams,
        on_tokens: Callable[[], None] | None = None,
    ) -> protocols.FinishReason:
        """Samples one turn (`protocols.Sampler.sample`). Fails after `rollout.generation_retries` failures."""
        # A request lives from its segment's first turn to the rollout's end, so later turns find it here.
        request = self._requests.get(segment.name) or self._arrive(segment)
        request.on_tokens, start = on_tokens, len(segment.token_ids)
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
                        await request.has_instance.wait()
                finally:
                    self._count_wait(request)
                    request.waits = False
            # Tokens of a broken stream count towards the turn's budget.
            finish = await self._stream(request, replace(sampling, max_tokens=sampling.max_tokens - sampled))
            if finish is not None:
                return finish

    def _arrive(self, segment: protocols.Segment) -> SegmentRequest:
        rollout = self._rollouts[segment.trajectory_id]
        request = SegmentRequest(segment, rollout.group_id, segment.generated_tokens)
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
        self._dispatcher.arrived(info, self)
        return request

    async def tool_called(self, segment: protocols.Segment) -> None:
        request = self._requests.get(segment.name)
        # A rollout that replays its past after a restart has no request yet.
        if request is not None:
            request.away, request.away_since = True, self._clock()
            request.displace()
            self._dispatcher.tool_called(request.name, request.generated)

    async def tool_returned(self, segment: protocols.Segment, causal_state: protocols.CausalState) -> None:
        request = self._requests.get(segment.name)
        if request is not None:
            now = self._clock()
            self._recorder.span("tools", causal_state.tool, request.away_since, now, {"request": request.name})
            request.away = False
            request.ask += 1
            self._dispatcher.tool_returned(request.name, request.generated, causal_state, segment.context_tokens)

    def placed(self, placement: protocols.Placement, ask: int) -> None:
        request = self._requests.get(placement.request_id)
        # Decided before the dispatcher learned of the request's tool call or end.
        if request is None or request.away or request.ask != ask:
            return
        if not placement.instance:
            request.displace()
            return
        # A move ends the stream. `sample` then opens one on the new instance, with the tokens so far.
        if request.stream is not None and request.stream.engine.name != placement.instance:
            request.stream.end()
        request.instance = placement.instance
        request.has_instance.set()
        request.route.take_placement(placement.move)

    async def _stream(
        self, request: SegmentRequest, sampling: protocols.SamplingParams
    ) -> protocols.FinishReason | None:
        """Streams tokens from the request's instance. Returns the finish reason, or None to resume elsewhere."""
        engine, begin = self._engines.engines[request.instance], self._clock()
        stream = EngineStream(engine, engine.life, self._loop.create_future(), begin, begin)
        request.stream = stream
        before = request.generated
        request.route.begin_stream(len(request.segment.turns), request.segment.context_tokens, self.counts)
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
            self._failed(engine, stream.life, error)
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

    async def _pump(self, request: SegmentRequest, stream: EngineStream, sampling: protocols.SamplingParams) -> None:
        self._streams += 1
        generation_request = protocols.GenerationRequest(
            # Unique per stream: an engine may still be aborting this request's last one.
            request_id=f"{request.name}#{self._streams}",
            token_ids=request.segment.context(),
            sampling=sampling,
            routed_tokens=request.segment.routed_tokens,
        )
        if stream.engine.client is None:
            raise protocols.WorkerLost(f"{stream.engine.name} was lost before {request.name} began there")
        async with contextlib.aclosing(stream.engine.client.generate(generation_request)) as deltas:
            async for delta in deltas:
                if stream.closed:
                    return
                now = stream.last_delta = self._clock()
                if not stream.answered:
                    stream.answered = True
                    self._engines.answered(stream.engine.name, stream.life)
                    request.route.record_answer(now - stream.begin, self.counts)
                request.segment.append_sampled(delta)
                request.generated += len(delta.token_ids)
                if request.on_tokens is not None:
                    request.on_tokens()
                if request.group_id != protocols.EVALUATION_GROUP:
                    self.counts.tokens += len(delta.token_ids)
                if delta.finish_reason == "abort":
                    raise protocols.LibraError(f"engine {stream.engine.name} aborted {request.name}")
                if delta.finish_reason is not None:
                    stream.finish = delta.finish_reason
                    return
                self._dispatcher.progressed(request.name, request.generated)
        raise protocols.WorkerLost(f"the stream of {request.name} from {stream.engine.name} ended without a finish")

    def _failed(self, engine: protocols.StreamEngine, life: int, error: BaseException) -> None:
        """Reports a failed instance. Its requests wait until the dispatcher has heard of it and places them again."""
        # On a loop worker each life has an object of its own, and another may serve by now.
        current = self._engines.engines.get(engine.name) is engine and engine.life == life
        self._engines.failed(engine.name, life, error)
        # In the dispatcher's process they are displaced already, and none is on the instance.
        for request in self._requests.values() if current else ():
            if request.instance == engine.name:
                request.displace()

    async def _watch(self) -> None:
        """Watches for streams without tokens beyond their deadline."""
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
                continue
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
                    peers = [peer for _, peer in streams if peer.engine is stream.engine]
                    if all(now - peer.last_delta >= self._deadline for peer in peers):
                        self._failed(stream.engine, stream.life, error)
                    stream.end(error)
