"""The session of a rollout that a harness drives: each request becomes an output of the rollout's trajectory.

Tokens in, tokens out: outputs are never tokenized again. A request whose messages begin with a known dialogue goes on
from the tokens of that dialogue. If nothing has followed its last output yet, the request continues the
segment. Any other request begins a segment, which shares with the others as many tokens as it can.

A resumed rollout starts its harness afresh. Requests that ask for the tokens that the trajectory holds already are
answered from them, and a cut-off output goes on where it ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

from libra_jax import protocols
from libra_jax.rollouts import lines, loop, outputs, record, tool_results
from libra_jax.utils import deadlines


class RolloutSession:
    """The session of one rollout (`protocols.Conversation`). Belongs to the event loop of its sampler.

    Args:
      trajectory: trajectory of the rollout; its tokens so far if it is resumed.
      form: chat format of the policy's model.
      sampler: source of tokens.
      limits: limits of the rollout. Its seconds are the caller's to keep.
      read_status: reads what a tool returned off the messages that a request adds.
      on_tokens: called at new tokens.
      strict: refuse requests for other sampling than the run's, or with hints. If False, these are counted.

    Attributes:
      limit: limit of the run that a request met, one of `protocols.LIMITS`; None if none did.
      broken: resolves to an error that a request met and that is not the client's fault: it has to end the rollout.
      active: number of requests under way.
      idle_since: event-loop time from which the agent could have asked for something, in seconds: the last request
        ended then, or requests could arrive again.
      hints: numbers of requests that asked for what they did not get, by its name.
      refusals: number of refused requests.
      refusal: why the last one was refused.
    """

    def __init__(
        self,
        trajectory: protocols.Trajectory,
        *,
        form: protocols.ChatFormat,
        sampler: protocols.Sampler,
        limits: loop.Limits,
        read_status: tool_results.ReadStatus,
        on_tokens: Callable[[], None] = lambda: None,
        strict: bool = False,
    ) -> None:
        self._trajectory = trajectory
        self._form = form
        self._sampler = sampler
        self._limits = limits
        self._read_status = read_status
        self._on_tokens = on_tokens
        self._strict = strict
        self._clock = asyncio.get_running_loop().time
        self._lines: list[lines.SegmentDialogue] = []
        self._closed = False
        self.limit: str | None = None
        self.broken: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.active = 0
        self.hints: collections.Counter[str] = collections.Counter()
        self.refusals, self.refusal = 0, ""
        self.idle_since = self._clock()
        self._reachable = True

    @property
    def answered(self) -> int:
        """Number of delivered outputs."""
        return sum(line.turn for line in self._lines)

    @property
    def _generated(self) -> int:
        """Number of tokens of delivered outputs."""
        return sum(line.generated for line in self._lines)

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the agent has asked for nothing though it could."""
        return self._clock() - self.idle_since if self._reachable and not self.active else 0.0

    def set_reachable(self, reachable: bool) -> None:
        """Stops and starts the clock of the agent's silence (`protocols.Gateway.open`)."""
        self._reachable = reachable
        if reachable:
            self.idle_since = self._clock()

    # Requests -------------------------------------------------------------------------------------------------------

    async def reply(
        self, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        """Streams one model output (`protocols.Conversation.reply`)."""
        try:
            if request.measures:
                self._check_room(len(request.messages), self.limit)  # the rollout meets no limit by a count
                tokens = len(self._rendered(request.messages, request.tools))
                yield protocols.Reply(protocols.Message("assistant", ""), "stop", tokens, 0)
                return
            if request.retry:
                self._take_back(tuple(request.tools), tuple(request.messages))
            self._check(request)
            line = self._place(request)
        except protocols.Refused as refused:
            if refused.kind == "invalid":
                self.note_refusal(str(refused))
            raise
        except protocols.EnvironmentCrashed as error:
            # The harness's own `status` broke. A client that goes on all the same must not hide that.
            self._break(error)
            raise
        line.busy = True
        self.active += 1
        try:
            # Closed at once where the client closes this one: Python would leave that to the garbage collector.
            async with contextlib.aclosing(self._output(line, request)) as items:
                async for item in items:
                    try:
                        yield item
                    except protocols.ClientGone as gone:
                        with contextlib.suppress(StopAsyncIteration):
                            await items.athrow(gone)
                        return
        except Exception as error:
            self._break(error)  # the engines failed for good, for example
            raise
        finally:
            line.busy = False
            self.active -= 1
            self.idle_since = self._clock()

    def note_refusal(self, sentence: str) -> None:
        """Counts a refused request (`protocols.Conversation.note_refusal`)."""
        self.refusals, self.refusal = self.refusals + 1, sentence

    def _break(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_result(error)

    def _check(self, request: protocols.ChatRequest) -> None:
        """Refuses requests that no output can follow."""
        limits = self._limits
        if self._closed:
            raise protocols.Refused("closed", "the rollout of this session has ended")
        if (spent := limits.spent(self.answered + self.active, self._generated)) is not None:
            self.limit = spent
            had = {
                "max_turns": f"had its {limits.max_turns} outputs",
                "max_tokens": f"generated its {limits.rollout_tokens} tokens",
            }
            raise protocols.Refused("limit", f"the rollout has {had[spent]} (task.{spent})")
        if not request.messages or request.messages[-1].role == "assistant":
            raise protocols.Refused("invalid", "the last message must not be from the assistant", "messages")
        self._check_room(len(request.messages))  # without the cost of a template: each takes a token
        hints = {*request.hints, *(request.options.used() if request.options != limits.options else ())}
        hints |= set() if request.temperature in (None, limits.temperature) else {"temperature"}
        self.hints.update(hints)
        if hints and self._strict:
            name = min(hints)
            sentence = "is no setting of a session; leave it out, or count it by config.gateway.strict=False"
            raise protocols.Refused("invalid", f"{name}: {sentence}", name)

    # The place of a request among the dialogues -----------------------------------------------------------------------

    def _place(self, request: protocols.ChatRequest) -> lines.SegmentDialogue:
        """Returns the line whose segment ends with the request's context."""
        tools, messages = tuple(request.tools), tuple(request.messages)
        for line in self._lines:
            # The client has an answer of which no one knew whether it arrived.
            if line.pending_output is not None and not line.busy and line.tools == tools:
                dialogue = (*line.messages, line.pending_output.message)
                if len(messages) > len(dialogue) and lines.same(dialogue, messages[: len(dialogue)]):
                    self._deliver(line, line.pending_output)
            # The client lost the answer, and asks again.
            if line.outstanding and not line.busy and line.tools == tools and lines.same(line.messages, messages):
                line.returned = protocols.CausalState("client", 0, "timeout")
                return line
        try:
            best_match = self._find_output(tools, messages)
            if best_match is not None:
                line, output = best_match
                # As they were before the client rewrote them: the template may want the reasoning, or the calls' ids.
                session_messages = line.messages[: output.messages]
                ids = lines.call_ids(session_messages, messages)
                failed = [ids.get(name, name) for name in request.failed_calls]
                request = dataclasses.replace(request, failed_calls=failed)
                messages = (
                    *session_messages,
                    *(lines.renamed(message, ids) for message in messages[len(session_messages) :]),
                )
                added = self._form.extend(messages, output.messages, tools)
                if added is not None:
                    # An output that a limit or a stop text ended lacks its stop token.
                    added = added if output.stopped else [self._form.stop_token_ids[0], *added]
                    return self._follow(line, output, request, messages, added)
        except protocols.DataError as error:
            raise protocols.Refused("invalid", str(error), "messages") from error
        prompt = self._rendered(messages, tools)
        self._check_room(len(prompt))
        return self._begin(prompt, tools, messages)

    def _rendered(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec]) -> list[int]:
        """Returns the tokens of a whole dialogue. Refuses one that the template refuses."""
        try:
            return self._form.render(messages, tools)
        except protocols.DataError as error:
            raise protocols.Refused("invalid", str(error), "messages") from error

    def _take_back(self, tools: tuple[protocols.ToolSpec, ...], messages: tuple[protocols.Message, ...]) -> None:
        """Takes back a delivered output that answered these messages and is a line's last: no one has read it."""
        for line in self._lines:
            last = line.outputs[-1] if line.outputs and not line.outstanding and not line.busy else None
            if last is None or line.tools != tools or not lines.same(line.messages[:-1], messages):
                continue
            tokens = line.segment.turns[line.turn - 1].generated_tokens
            line.pending_output = lines.PendingOutput(line.messages[-1], tokens, last.stopped, unseen=True)
            line.messages, line.outstanding = line.messages[:-1], True
            line.pass_output(-tokens, -1)
            line.outputs.pop()
            return

    def _find_output(
        self, tools: tuple[protocols.ToolSpec, ...], messages: tuple[protocols.Message, ...]
    ) -> tuple[lines.SegmentDialogue, lines.ClientOutput] | None:
        """Returns the delivered output that has the longest dialogue up to it which these messages begin with."""
        best: tuple[lines.SegmentDialogue, lines.ClientOutput] | None = None
        for line in self._lines:
            if line.tools != tools:
                continue
            same = next(
                (at for at, pair in enumerate(zip(line.messages, messages, strict=False)) if not lines.equal(*pair)),
                min(len(line.messages), len(messages)),
            )
            output = next((output for output in reversed(line.outputs) if output.messages <= same), None)
            if output is not None and (best is None or output.messages > best[1].messages):
                best = line, output
        return best

    def _follow(
        self,
        line: lines.SegmentDialogue,
        output: lines.ClientOutput,
        request: protocols.ChatRequest,
        messages: tuple[protocols.Message, ...],
        added: list[int],
    ) -> lines.SegmentDialogue:
        """Continues the line if nothing has followed the output yet, else begins a segment after the output."""
        segment = line.segment
        self._check_room(segment.shared + output.end + len(added))
        last = output is line.outputs[-1] and not line.outstanding
        if not last or not line.fits(added):
            output_context = segment.context()[: segment.shared + output.end]
            return self._begin([*output_context, *added], line.tools, messages)
        line.append(added, protocols.TokenSource.TOOL)
        line.returned = self._returned(line, messages[output.messages :], request.failed_calls, len(added))
        line.messages, line.outstanding = messages, True
        return line

    def _begin(
        self,
        context: list[int],
        tools: tuple[protocols.ToolSpec, ...],
        messages: tuple[protocols.Message, ...],
    ) -> lines.SegmentDialogue:
        """Begins a line with this context, on a segment that a resumed rollout holds already, or on a new one."""
        used_segments = {id(line.segment) for line in self._lines}
        for segment in self._trajectory.segments:
            own_length = len(context) - segment.shared
            if id(segment) in used_segments or own_length <= 0 or own_length > len(segment.token_ids):
                continue
            # What follows the prompt has to be an output, or nothing yet.
            cut_off = own_length == len(segment.token_ids) or segment.sources[own_length] == protocols.TokenSource.MODEL
            if cut_off and list(segment.context()[: len(context)]) == context:
                line = lines.SegmentDialogue(segment, own_length, tools=tools, messages=messages)
                break
        else:
            root = self._trajectory
            unused = not root.token_ids and id(root) not in used_segments
            segment = root if unused else root.branch(*self._nearest(context))
            line = lines.SegmentDialogue(segment, tools=tools, messages=messages)
            # `branch` may share less, or with an ancestor.
            line.append(context[segment.shared :], protocols.TokenSource.PROMPT)
        self._lines.append(line)
        return line

    def _nearest(self, context: Sequence[int]) -> tuple[protocols.Segment | None, int]:
        """Returns the segment whose known context has the most first tokens in common with this one, and how many."""
        parent, shared = None, 0
        for line in self._lines:
            line_context = line.segment.context()[: line.segment.shared + line.position]
            # The last token is always an own one: no parent can predict a segment's first sampled token.
            common = lines.common(line_context, context[:-1])
            if common > shared:
                parent, shared = line.segment, common
        return parent, shared

    def _check_room(self, context: int, limit: str | None = "max_context") -> None:
        if context >= self._limits.max_context:
            self.limit = limit
            raise protocols.Refused(
                "context",
                f"the messages take {context} tokens, which leaves no room to answer within the context of "
                f"{self._limits.max_context} tokens (rollout.max_context)",
                "messages",
            )

    def _returned(
        self,
        line: lines.SegmentDialogue,
        added: Sequence[protocols.Message],
        failed_calls: Sequence[str],
        payload_tokens: int,
    ) -> protocols.CausalState:
        """Returns what the messages after the line's last output say of its tools. Records it in the output's turn."""
        calls = {call.call_id: call for call in line.messages[line.outputs[-1].messages - 1].tool_calls}
        answers: list[protocols.ToolReturn] = []
        first = next(iter(calls.values()), None)
        if first is not None and added and added[0].role == "user" and all(item.role != "tool" for item in added):
            # An agent without the role "tool": what comes first answers the call.
            added = [dataclasses.replace(added[0], role="tool", tool_call_id=first.call_id), *added[1:]]
        for message in added:
            answered_call = calls.get(message.tool_call_id)
            read = self._read_status(answered_call, message)
            if read is not None:
                tool, outcome = read
                marked = message.tool_call_id in failed_calls and outcome == "success"
                outcome = "failure" if marked else outcome
                answers.append(
                    protocols.ToolReturn(tool, outcome, message.content, call=tool_results.call(answered_call))
                )
        turn = line.segment.turns[line.turn - 1]
        record.record_returns(turn, answers, self._clock() - line.answered_at)
        return record.record_payload(turn, answers, payload_tokens)

    # Outputs --------------------------------------------------------------------------------------------------------

    async def _output(
        self, line: lines.SegmentDialogue, request: protocols.ChatRequest
    ) -> AsyncGenerator[protocols.MessageDelta | protocols.Reply, None]:
        segment, start, start_seconds = line.segment, line.position, self._clock()
        token_count, complete = line.retained_output(self._form.stop_token_ids)
        complete = complete or start + token_count < len(segment.token_ids)
        room = self._limits.room(segment.shared + start, self._generated)
        room = room if request.max_tokens is None else min(room, request.max_tokens)
        parser = self._form.parser(request.tools, segment.context()[: segment.shared + start])
        reader = outputs.Reader(self._form, parser, request.stop)
        if complete or token_count >= room:
            for delta in reader.feed(segment.token_ids[start : start + token_count]):
                yield delta
        else:
            async with contextlib.aclosing(self._sample(line, room - token_count, reader)) as deltas:
                async for delta in deltas:
                    yield delta
        token_count = reader.tokens
        beyond = segment.sources[start + token_count :]
        if beyond and all(source == protocols.TokenSource.MODEL for source in beyond):
            # Tokens that the engine had sampled beyond a stop text are no part of the output.
            segment.cut(start + token_count)
        rest, message = reader.finish()
        for delta in rest:
            yield delta
        line.record_output(token_count, start_seconds)
        line.pending_output = lines.PendingOutput(message, token_count, reader.stopped)
        ids, scores = segment.token_ids[start : start + token_count], segment.log_probs[start : start + token_count]
        reply = protocols.Reply(
            message=message,
            finish="tool_calls" if message.tool_calls else "stop" if reader.ended else "length",
            prompt_tokens=segment.shared + start,
            output_tokens=token_count,
            output_ids=tuple(ids),
            log_probs=tuple(scores),
            stop_text=reader.stop_text,
        )
        try:
            yield reply
        except protocols.ClientGone:
            line.pending_output = dataclasses.replace(line.pending_output, unseen=True)
            return
        self._deliver(line, line.pending_output)

    def _deliver(self, line: lines.SegmentDialogue, pending_output: lines.PendingOutput) -> None:
        """Makes a complete output a part of the line's dialogue."""
        line.messages = (*line.messages, pending_output.message)
        line.pass_output(pending_output.tokens)
        line.outputs.append(lines.ClientOutput(len(line.messages), line.position, pending_output.stopped))
        line.outstanding, line.pending_output, line.returned, line.answered_at = False, None, None, self._clock()
        if self.limit == "max_context":  # the harness has found a way to go on
            self.limit = None

    async def _sample(
        self, line: lines.SegmentDialogue, room: int, reader: outputs.Reader
    ) -> AsyncGenerator[protocols.MessageDelta, None]:
        """Samples at most `room` more tokens of the line's output, and streams it from its beginning on."""
        segment, fed, more = line.segment, line.position, asyncio.Event()

        def handle_tokens() -> None:
            self._on_tokens()
            more.set()

        if line.returned is not None:
            await self._sampler.tool_returned(segment, line.returned)
        limits = self._limits
        sampling = protocols.SamplingParams(limits.temperature, room, tuple(self._form.stop_token_ids), limits.options)
        work = asyncio.ensure_future(self._sampler.sample(segment, sampling, handle_tokens))
        work.add_done_callback(lambda _: more.set())
        try:
            while not reader.ended:
                more.clear()
                done, end = work.done(), len(segment.token_ids)
                for delta in reader.feed(segment.token_ids[fed:end]):
                    yield delta
                fed = end
                if done:
                    break
                if not more.is_set() and not reader.ended:
                    await more.wait()
            if work.done():
                work.result()  # raises what ended the sampling
        finally:
            # The client may be gone, or a stop text ended the output before the engine did.
            await deadlines.cancel_all((work,))
            await self._sampler.tool_called(segment)

    # The end --------------------------------------------------------------------------------------------------------

    @property
    def dialogue(self) -> Sequence[protocols.Message]:
        """The dialogue whose last output was delivered last; empty if none was."""
        answered = [line for line in self._lines if line.outputs]
        return max(answered, key=lambda line: line.answered_at).messages if answered else ()

    def close(self) -> None:
        """Ends the session. Tokens that the harness never saw leave the trajectory, or are not trained.

        Call it once no request is under way.
        """
        self._closed = True
        if self.limit == "max_turns" and self.answered + sum(
            line.pending_output is not None for line in self._lines
        ) < (self._limits.max_turns):
            # Outputs under way were counted, and one of them ended without an answer.
            self.limit = None
        for line in self._lines:
            # The harness went on, so it has the answer: it would have asked again.
            if line.pending_output is not None and not line.pending_output.unseen:
                self._deliver(line, line.pending_output)
        by_segment = {id(line.segment): line for line in self._lines}
        # Children first: what they share has to stay.
        needed: dict[int, int] = {}
        for segment in reversed(self._trajectory.segments):
            segment_line = by_segment.get(id(segment))
            client_position = segment_line.position if segment_line is not None else 0
            length = max(client_position, needed.get(id(segment), 0))
            segment.cut(length)
            del segment.turns[segment_line.turn if segment_line is not None else 0 :]
            # Context of a child, which another output than this rollout's may have led to.
            segment.disown(client_position, length)
            if not length:
                # Of a resumed rollout, whose harness went another way. What it shared may be gone as well.
                segment.parent, segment.shared = None, 0
            elif segment.parent is not None:
                shared_length = segment.shared - segment.parent.shared
                needed[id(segment.parent)] = max(needed.get(id(segment.parent), 0), shared_length)
