"""Makes trajectories of solved rollouts for the warm start, rendered exactly as the live loop renders them."""

from __future__ import annotations

from libra_jax import protocols


def demonstration_trajectory(
    task: protocols.Task, demonstrator: protocols.Demonstrator, tokenizer: protocols.Tokenizer
) -> protocols.Trajectory:
    """Returns the tokens of a solved dialogue. The loss covers the assistant's tokens, including stop tokens.

    Raises:
      EnvironmentCrashed: The dialogue does not begin with a prompt and end with an answer of the assistant.
    """
    messages = list(demonstrator.demonstration(task))
    if len(messages) < 2 or messages[0].role == "assistant" or messages[-1].role != "assistant":
        raise protocols.EnvironmentCrashed(
            f"task {task.prompt_id}: its demonstration must begin with a prompt and end with the assistant's answer"
        )
    trajectory = protocols.Trajectory(f"{task.prompt_id}/demonstration", task.prompt_id)
    pending: list[protocols.Message] = []
    for message in messages:
        if message.role != "assistant":
            pending.append(message)
            continue
        first = not trajectory.token_ids
        source = protocols.TokenSource.PROMPT if first else protocols.TokenSource.TOOL
        trajectory.append_text(tokenizer.render(pending, first=first, generation_prompt=True), source)
        pending = []
        output = (*tokenizer.encode(message.content), tokenizer.stop_token_ids[0])
        unsampled = (protocols.NO_VERSION,) * len(output)
        trajectory.append_sampled(protocols.TokenDelta(output, (0.0,) * len(output), unsampled, "stop"))
        trajectory.turns.append(protocols.Turn(generated_tokens=len(output)))
    trajectory.reward, trajectory.finish = 1.0, "demonstration"
    return trajectory
