"""The record of a rollout, to which the loop of environments and the sessions of harnesses append.

`TokenRecord` accounts for the tokens and turns of a segment. The functions after it record what tools returned, and
read causal states. `RolloutRecord` ends the rollout: it makes the transcript, asks for the score, and adds the metrics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from libra_jax import protocols
from libra_jax.chat import thoughts
from libra_jax.rewards import scoring
from libra_jax.rollouts import tool_results
from libra_jax.utils import resolving, user_values


class ReplayDiffers(Exception):
    """The retained tokens differ from those that this environment and template produce."""


@dataclass(eq=False)
class TokenRecord:
    """The tokens of a segment, accounted for one text or output after the other. A resume may have retained more.

    Attributes:
      segment: Tokens and turns, empty or cut off anywhere.
      position: Number of own tokens accounted for.
      turn: Number of outputs accounted for.
      generated: Number of tokens accounted for that the policy sampled.
    """

    segment: protocols.Segment
    position: int = 0
    turn: int = 0
    generated: int = 0

    @property
    def at_end(self) -> bool:
        """Whether all retained tokens are accounted for."""
        return self.position == len(self.segment.token_ids)

    def fits(self, text: Sequence[int]) -> bool:
        """Returns whether the tokens from `position` on are none, or begin with this text (or are its beginning)."""
        if self.at_end:
            return True
        retained, sources = self.segment.token_ids[self.position :], self.segment.sources[self.position :]
        sampled = any(source == protocols.TokenSource.MODEL for source in sources[: len(text)])
        follows = len(retained) <= len(text) or sources[len(text)] == protocols.TokenSource.MODEL
        return not sampled and follows and list(text[: len(retained)]) == list(retained[: len(text)])

    def append(self, text: Sequence[int], source: protocols.TokenSource) -> None:
        """Accounts for text. Appends what goes beyond the retained tokens; raises `ReplayDiffers` if those differ."""
        retained = self.segment.sources[self.position : self.position + len(text)]
        if not self.fits(text) or any(item != source for item in retained):
            raise ReplayDiffers
        # The rollout may have been cut off in the middle of this text.
        self.segment.append_text(text[len(self.segment.token_ids) - self.position :], source)
        self.position += len(text)

    def retained_output(self, stop_token_ids: Collection[int]) -> tuple[int, bool]:
        """Returns the number of retained tokens of the output at `position`, and whether they end with a stop token."""
        token_count = 0
        tokens, sources = self.segment.token_ids[self.position :], self.segment.sources[self.position :]
        for token, source in zip(tokens, sources, strict=True):
            if source != protocols.TokenSource.MODEL:
                break
            token_count += 1
            if token in stop_token_ids:
                return token_count, True
        return token_count, False

    def record_output(self, generated: int, start_seconds: float) -> None:
        """Records the turn of the output at `position`. Fills in the turn that a resume retained."""
        turns = self.segment.turns
        if self.turn < len(turns):
            turns[self.turn].generated_tokens = generated
        else:
            turns.append(protocols.Turn(generated_tokens=generated, start_seconds=start_seconds))

    def pass_output(self, generated: int, outputs: int = 1) -> None:
        """Accounts for a recorded output; with negative numbers, takes that back."""
        self.position += generated
        self.turn += outputs
        self.generated += generated


_FROM_BEST = ("success", "failure", "timeout")
"""Outcomes of tools. Of several in one turn, the worst counts."""


def record_returns(turn: protocols.Turn, answers: Sequence[protocols.ToolReturn], seconds: float) -> None:
    """Records in a turn what its tools returned, if it called any, and the seconds since its output."""
    # A replayed turn keeps the seconds that it took the first time.
    turn.tool_seconds = turn.tool_seconds or seconds
    if not answers:
        return
    # Each tool's name once and in a fixed order, so that a replayed turn has the same causal state.
    turn.tool = "+".join(sorted({answer.tool for answer in answers}))
    turn.status = max((answer.status for answer in answers), key=_FROM_BEST.index)
    turn.call = "+".join(sorted({answer.call for answer in answers if answer.call}))
    errors = (answer.error or tool_results.error(answer.content) for answer in answers if answer.status != "success")
    turn.error = next(filter(None, errors), "")


def record_payload(
    turn: protocols.Turn, answers: Sequence[protocols.ToolReturn], payload_tokens: int
) -> protocols.CausalState:
    """Records in a turn how many tokens followed its output, and returns the causal state for the scheduler."""
    turn.payload_tokens = payload_tokens
    if not answers:
        return protocols.CausalState("environment", payload_tokens, "success")
    return causal_states([turn])[0]


def causal_states(turns: Sequence[protocols.Turn]) -> tuple[protocols.CausalState, ...]:
    """Returns what the tools of these turns returned, in order."""
    return tuple(
        protocols.CausalState(turn.tool, turn.payload_tokens, turn.status, turn.call, turn.error)
        for turn in turns
        if turn.tool is not None and turn.status is not None
    )


def opening(tokenizer: protocols.Tokenizer, token_ids: Sequence[int], start: int) -> str:
    """Returns the beginning of a thought, if the template has written it before the output at `start`.

    Environments and rewards read this text before the output. Without it, a thought would pass for an answer.
    """
    return thoughts.opening(tokenizer.decode(token_ids[max(0, start - thoughts.TOKENS) : start]))


def policy_text(tokenizer: protocols.Tokenizer, trajectory: protocols.Trajectory) -> str:
    """Returns the outputs of a rollout's policy, without their stop tokens, joined by line breaks."""
    outputs = []
    for segment in trajectory.segments:
        for source, start, end in segment.runs():
            if source == protocols.TokenSource.MODEL:
                stopped = segment.token_ids[end - 1] in tokenizer.stop_token_ids
                text = tokenizer.decode(segment.token_ids[start : end - stopped])
                outputs.append(opening(tokenizer, segment.token_ids, start) + text)
    return "\n".join(outputs)


def turn_metrics(turns: Sequence[protocols.Turn], reward: float, finish: str) -> dict[str, float]:
    """Returns the metrics that are added to an environment's or harness's own (`loop.run_rollout`)."""
    calls = [turn for turn in turns if turn.tool is not None]
    after_tool = reward > 0 and finish == "answered" and any(turn.status == "success" for turn in calls)
    return {
        "turns": float(len(turns)),
        "tool_calls": float(len(calls)),
        "tool_timeouts": float(sum(turn.status == "timeout" for turn in calls)),
        "tool_success": float(bool(calls) and calls[-1].status == "success"),
        "rewarded_after_tool": float(after_tool),
        "answered": float(finish == "answered"),
    }


@dataclass(kw_only=True)
class RolloutRecord:
    """A rollout, with what its end needs.

    Attributes:
      trajectory: Empty for a new rollout. Otherwise the trajectory of an aborted rollout, cut off anywhere.
      task: Task of the rollout.
      tokenizer: Tokenizer. Its template is applied to increments only.
      reward: Scores every finished rollout, with its own deadlines. None: the environment's reward counts.
    """

    trajectory: protocols.Trajectory
    task: protocols.Task
    tokenizer: protocols.Tokenizer
    reward: scoring.Scorer | None = None

    async def end(
        self,
        finish: str,
        reward: float | None,
        messages: Sequence[protocols.Message],
        metrics: Mapping[str, float],
    ) -> None:
        """Scores the rollout, and sets its reward, finish and metrics.

        Args:
          finish: One of `protocols.FINISHES`.
          reward: The environment's or harness's own. It has to be finite unless a scorer replaces it.
          messages: Dialogue that ends with the last output.
          metrics: Numbers of the environment, the harness or the loop.

        Raises:
          RewardFailed: The scorer broke, or gave a reward that is not a finite number.
        """
        trajectory, turns = self.trajectory, self.trajectory.all_turns
        # Taken before a scorer replaces it: the environment's own reward is recorded, too.
        environment_reward = float(reward) if user_values.is_finite(reward) else None
        if self.reward is not None:
            transcript = scoring.Transcript(
                text=policy_text(self.tokenizer, trajectory),
                dialogue="\n".join(self.tokenizer.decode(segment.context()) for segment in trajectory.segments),
                answer=thoughts.split(messages[-1].content).answer.strip() if messages and finish == "answered" else "",
                finish=finish,
                messages=tuple(messages),
                tools=causal_states(turns),
                # A scorer does not see whether the rollout was interrupted, so that an interruption changes no reward.
                metrics={name: value for name, value in metrics.items() if name != "replay_differs"},
                environment_reward=environment_reward,
            )
            score = await _score(self.reward, self.task, transcript)
            reward, metrics = score.reward, {**metrics, **score.metrics}
        assert reward is not None
        trajectory.metrics.update(metrics)
        trajectory.metrics.update(turn_metrics(turns, float(reward), finish))
        trajectory.reward, trajectory.finish, trajectory.environment_reward = float(reward), finish, environment_reward


async def _score(scorer: scoring.Scorer, task: protocols.Task, transcript: scoring.Transcript) -> scoring.Score:
    """Returns the score of a finished rollout, after its check."""
    crash = f"reward, task {task.prompt_id}: it"
    try:
        result = await scorer(task, transcript)
    except protocols.LibraError:
        raise
    except Exception as error:
        raise protocols.RewardFailed(f"{crash} {resolving.raised(error)}") from error
    if not user_values.is_finite(result.reward):
        raise protocols.RewardFailed(f"{crash} gave {user_values.shown(result.reward)}, which is not a finite number")
    return result
