"""What the tests of the multi-turn loop share: a sampler that plays a script, and an environment with loose parts."""

import asyncio

from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.examples import calculator
from libra_jax.rollouts import loop

TOKENIZER = tokenizers.CharacterTokenizer()
STOP = TOKENIZER.stop_token_ids[0]
LIMITS = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=5.0, temperature=1.0)
SHORT = loop.Limits(max_turns=4, max_tokens=40, max_context=200, tool_seconds=0.02, temperature=1.0, reset_seconds=0.05)


class OpensThoughts(tokenizers.CharacterTokenizer):
    """Its template opens the thought at the end of the context, as those of DeepSeek-R1 and Nemotron 3 do."""

    def render(self, messages, *, first, generation_prompt):
        tokens = super().render(messages, first=first, generation_prompt=generation_prompt)
        return [*tokens, *(self.encode("<think>\n") if generation_prompt else ())]


class ScriptedSampler:
    """Plays model outputs by turn, however much of a turn is already there; the log-prob of a token tells its place.

    Tokens come `delta` at a time, `seconds` after one another.
    """

    def __init__(self, outputs: list[str], stop: bool = True, *, delta: int = 1000, seconds: float = 0.0) -> None:
        self.outputs = [[*TOKENIZER.encode(text), *([STOP] if stop else [])] for text in outputs]
        self.delta, self.seconds = delta, seconds
        self.events: list[object] = []
        self.requests: list[protocols.SamplingParams] = []

    async def sample(self, trajectory, sampling, on_tokens=None):
        self.requests.append(sampling)
        start = len(trajectory.token_ids)
        while start and trajectory.sources[start - 1] == protocols.TokenSource.MODEL:
            start -= 1
        turn = sum(
            source != protocols.TokenSource.MODEL and after == protocols.TokenSource.MODEL
            for source, after in zip(trajectory.sources[:start], trajectory.sources[1:start], strict=False)
        )
        have = len(trajectory.token_ids) - start
        tokens = self.outputs[turn][have : have + sampling.max_tokens]
        self.events.append("sample")
        reason = "stop" if tokens and tokens[-1] == STOP else "length"
        await asyncio.sleep(0)
        for place in range(0, len(tokens), self.delta):
            if self.seconds:
                await asyncio.sleep(self.seconds)
            self.append(trajectory, tokens[place : place + self.delta])
            if on_tokens:
                on_tokens()
        return reason

    def append(self, trajectory, tokens):
        places = range(len(trajectory.token_ids), len(trajectory.token_ids) + len(tokens))
        log_probs = tuple(-0.01 * place for place in places)
        trajectory.append_sampled(protocols.TokenDelta(tuple(tokens), log_probs, (7,) * len(tokens)))

    async def tool_called(self, trajectory):
        self.events.append("called")

    async def tool_returned(self, trajectory, causal_state):
        self.events.append(causal_state)


def task_of(expression="12*34", answer="408"):
    return protocols.Task("t", {"expression": expression, "answer": answer, "max_characters": 18})


def attempt(outputs, *, sampler=None, **arguments):
    """The attempt at its end, and its sampler."""
    sampler = sampler or ScriptedSampler(outputs)
    return asyncio.run(run(sampler=sampler, **arguments)), sampler


async def run(*, task=None, environment=None, limits=LIMITS, trajectory=None, tokenizer=TOKENIZER, **arguments):
    trajectory = trajectory if trajectory is not None else protocols.Trajectory("t/0", "t")
    task, environment = task or task_of(), environment or calculator.environment(prompt_width=0, return_width=0)
    setup = loop.RolloutSetup(trajectory=trajectory, task=task, tokenizer=tokenizer, limits=limits, **arguments)
    result = await loop.run_rollout(setup, environment)
    assert result is trajectory
    return result


def check_books(trajectory):
    """Columns agree with each other and with the turns."""
    lengths = {
        len(values)
        for values in (
            trajectory.token_ids,
            trajectory.sources,
            trajectory.loss_mask,
            trajectory.log_probs,
            trajectory.policy_versions,
        )
    }
    assert len(lengths) == 1
    sampled = [int(source == protocols.TokenSource.MODEL) for source in trajectory.sources]
    assert list(trajectory.loss_mask) == sampled
    assert [version != protocols.NO_VERSION for version in trajectory.policy_versions] == sampled
    assert sum(turn.generated_tokens for turn in trajectory.turns) == trajectory.generated_tokens
    shown = sum(source == protocols.TokenSource.TOOL for source in trajectory.sources)
    assert sum(turn.payload_tokens for turn in trajectory.turns) == shown


def tool_text(trajectory):
    """What the policy was shown after its outputs."""
    pairs = zip(trajectory.token_ids, trajectory.sources, strict=True)
    return TOKENIZER.decode([token for token, source in pairs if source == protocols.TokenSource.TOOL])


class Probe:
    """An environment whose parts can be replaced; remembers what was called."""

    def __init__(self, step=None, reset=None, close=None):
        self._step, self._reset, self._close = step, reset, close
        self.closed = self.resets = self.cancelled = 0

    async def reset(self, task):
        self.resets += 1
        if self._reset:
            return await self._reset(task)
        return [protocols.Message("user", "q")]

    async def step(self, output):
        try:
            return await self._step(output)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def close(self):
        self.closed += 1
        if self._close:
            await self._close()


async def forever(*_):
    await asyncio.Event().wait()
