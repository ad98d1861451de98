"""Describes what a run would be, for `--dry_run`; starts nothing."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import wiring
from libra_jax.chat import tokenizers
from libra_jax.cluster import placement, resolved_run
from libra_jax.config import listing
from libra_jax.environments import datasets
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.costs import costs, memory
from libra_jax.rewards import answers, scoring, trial
from libra_jax.rollouts import factories, rehearsal
from libra_jax.telemetry import escapes
from libra_jax.tools.sandbox import limits
from libra_jax.utils import machine, resolving, tables

PROMPT_CHARACTERS = 60

PROMPT_SHOWN = 2_000
"""Characters of the first prompt that are shown; the middle of a longer one is left out."""


def settings(config: config_lib.RunConfig) -> str:
    """Returns the settings of a config that differ from their defaults, as flags, with secrets blacked out."""
    changed = listing.changed(type(config), escapes.redacted_settings(listing.values_of(config)))
    lines = [f"settings    {len(changed)} differ from their default; --config_help lists all"]
    return "\n".join([*lines, *(f"  --config.{name}={value!r}" for name, value in changed.items())])


def describe(
    run: resolved_run.ResolvedRun,
    notes: Sequence[str] = (),
    reward_results: Sequence[trial.Scored] = (),
    posed: rehearsal.Posed | None = None,
    earned: float | None = None,
) -> str:
    """Returns the policy, the tasks, the reward, the objective, the device mesh, the partition and the memory.

    Args:
      run: the run.
      notes: sentences about the replacements of Hugging Face ids.
      reward_results: what the reward functions made of `example`.
      posed: the first task as the environment poses it; None if it is not known.
      earned: reward of the user's environment for the first task with its own answer; None if it is not known.
    """
    config, shape = run.config, run.shape
    parts, size = run.partition, machine.bytes_text
    trainer, reward = config.trainer, config.reward
    terms = [(reward.environment_weight, "the environment's own")] if reward.environment_weight else []
    terms += [
        (function.weight, f"{name} ({resolving.shown(function.factory, function.arguments)})")
        for name, function in reward.parsed().items()
    ]
    of_trainer = ""
    if shape is not None:
        every, adapter = model_config.parameter_count(shape), adapters.parameter_count(shape)
        numbers = (adapter or every) + memory.moment_numbers(config, shape)
        state = costs.VALUE_BYTES[config.model.param_dtype] * numbers
        if adapter:
            state += costs.VALUE_BYTES[config.model.compute_dtype] * every  # frozen
        of_trainer = (
            f": {size(state / trainer.replica_devices)} of parameters and optimizer a device, about "
            f"{size(memory.trainer_bytes(config, shape))} with gradients, activations and logits"
        )
    lines = [
        f"policy      {_policy(config, shape)}",
        *(f"  {note}" for note in notes),
        *_tasks(config),
        *(_prompt(config, posed) if posed is not None else ()),
        f"reward      {' + '.join(what if weight == 1 else f'{weight:g} x {what}' for weight, what in terms)}",
        *([f"  environment gave {earned:g} {EXAMPLE}"] if earned is not None else []),
        *(f"  {one.name} gave {one.outcome.value:g} {EXAMPLE}" for one in reward_results if not one.outcome.problem),
        *_learning(config),
        f"mesh        data={trainer.data} fsdp={trainer.fsdp} tensor={trainer.tensor} context={trainer.context}",
        f"partition   {parts.total} devices",
        f"  trainer   {_ordinals(parts.trainer)}{of_trainer}",
    ]
    lines += [
        f"  rollout-{index} {_ordinals(devices)}: tensor parallel {len(devices)}, {slots} slots"
        + (f", {size(memory.weight_bytes(config, shape, len(devices)))} of weights a device" if shape else "")
        for index, (devices, slots) in enumerate(zip(parts.instances, config.rollout.instance_slots, strict=True))
    ]
    arguments = ", ".join(f"{name}={value}" for name, value in config.rollout.engine_arguments.items())
    lines += [f"  engine    {config.rollout.engine} with {arguments}"] if arguments else []
    lines.append(f"memory      {memory.verdict(config, shape) if shape else 'not known without the model'}")
    lines += _hosts(run)
    lines += _elastic(config)
    batch = config.coordinator.groups_per_step * config.coordinator.group_size
    lines.append(
        f"step        {config.coordinator.groups_per_step} prompts x {config.coordinator.group_size} rollouts = "
        f"{batch} trajectories, staleness at most {config.coordinator.max_staleness}{_flow(config)}"
    )
    return "\n".join(lines)


def _flow(config: config_lib.RunConfig) -> str:
    """Describes how groups and steps flow, where that differs from whole batches of the groups needed."""
    text, spare = "", config.coordinator.spare_groups
    if spare:
        fate = "recycled" if config.coordinator.recycle else "aborted"
        text += f", {spare} more groups under way, those left over {fate}"
    if config.trainer.stream != "off":
        text += f", begun by {config.trainer.stream.replace('_', '-')}"
    if config.rollout.loop_workers:
        text += f", agent loops in {config.rollout.loop_workers} loop workers"
    return text


def _policy(config: config_lib.RunConfig, shape: model_config.TransformerConfig | None) -> str:
    """Describes architecture and size; without the model's directory, also their source."""
    if shape is None:
        return (
            f"not known: no model at {config.model.path}, so what depends on its shape was not checked "
            "(config.model.preset can name one of the same shape)"
        )
    count = model_config.parameter_count(shape)
    text = f"{shape.architecture}, {f'{count / 1e6:,.2f} M' if count >= 10_000 else f'{count:,}'} parameters"
    if shape.adapter is not None:
        lora = config.model.lora
        text += f", frozen under an adapter of rank {lora.rank} with {adapters.parameter_count(shape):,} parameters"
        text += f" (weight syncs send {'it' if lora.sync == 'adapter' else 'merged weights'})"
    if not config.model.path or Path(config.model.path).exists():
        return text
    return f"{text} (no model at {config.model.path}: this is model.preset={config.model.preset})"


def _learning(config: config_lib.RunConfig) -> list[str]:
    """Describes the objective, the reference policy and the optimizer."""
    algorithm, optimizer = config.algorithm, config.optimizer
    bounds = f"[{1 - algorithm.clip_low:g}, {1 + algorithm.clip_high:g}]"
    unmoved = algorithm.objective == "decoupled" and algorithm.proximal == "recompute" and algorithm.updates == 1
    ratio = "ratio 1, no clip" if unmoved else f"ratio in {bounds}"
    if ":" in algorithm.loss or algorithm.loss in ("sapo", "kl_cov"):
        ratio = "its own bounds" if ":" in algorithm.loss else "no clip"
    if algorithm.loss == "gmpo":
        ratio = f"log-ratio in [{-algorithm.clip_low:g}, {algorithm.clip_high:g}]"
    several = f", {algorithm.minibatches} mini-batches x {algorithm.epochs} epochs" if algorithm.updates > 1 else ""
    warming = f", alone in the first {config.critic.warmup_steps} steps" if config.critic.warmup_steps else ""
    kl = "off: no reference model"
    if algorithm.kl_coefficient:
        where = "the reward" if algorithm.kl_in_reward else "the loss"
        reference = "the frozen weights" if config.model.lora.rank else "the initial policy"
        reference = algorithm.teacher or reference
        kl = f"{algorithm.kl_coefficient:g} x {algorithm.kl_estimator} to {reference}, in {where}"
    less = "" if algorithm.baseline == "mean" else f" less {resolving.shown(algorithm.baseline)}"
    warmup = f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    rate = f"learning rate {optimizer.learning_rate:g}, {resolving.shown(optimizer.schedule)}{warmup}"
    clip = f"norm clipped at {optimizer.clip_norm:g}" if optimizer.clip_norm else "norm not clipped"
    return [
        f"algorithm   {algorithm.advantage} advantages{less}, {algorithm.loss} loss ({ratio}), "
        f"{algorithm.aggregation}, objective {algorithm.objective}, correction {algorithm.correction}{several}",
        f"KL          {kl}",
        *([f"critic      learning rate {config.critic.learning_rate:g}{warming}"] * config.critic.enabled),
        f"optimizer   {resolving.shown(optimizer.name)}, {rate}, {clip}",
    ]


def _hosts(run: resolved_run.ResolvedRun) -> list[str]:
    """Lists the processes of each host if the run is laid out over several hosts."""
    config, layout = run.config, run.layout
    if layout is None:
        return []
    lines = [f"hosts       {len(layout.hosts)}, of {config.cluster.accelerators_per_host} accelerators each"]
    for host in layout.hosts:
        processes = [f"process {number} of the trainer" for number in host.processes]
        names = processes + [placement.instance_name(number) for number in host.instances]
        lines.append(f"  host {host.number}    {host.role}, {host.accelerators} taken: {', '.join(names)}")
    return lines


def _elastic(config: config_lib.RunConfig) -> list[str]:
    """Lists the workers that may switch sides or change size during the run."""
    elastic, lines = config.elastic, []
    if elastic.hybrid:
        count = len(config.rollout.tensor_parallel)
        names = ", ".join(placement.instance_name(number) for number in range(count - elastic.hybrid, count))
        replica = config.trainer.replica_devices
        over = f"{replica} device{'s' * (replica > 1)}"
        lines.append(f"hybrid      {names}: also a data-parallel replica of the trainer, over {over}")
    if elastic.resize:
        largest, local = wiring.reach(config), config.trainer.devices + elastic.spare_devices
        where = f"; above {local}, in other processes" if largest > local else " in the trainer's process"
        lines.append(f"resize      plans may change the mesh, to at most {largest} devices{where}")
    return lines


def _ordinals(devices: tuple[int, ...]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _tasks(config: config_lib.RunConfig) -> list[str]:
    """Describes the source of the tasks, their number, the first task, and columns of the file that nothing reads."""
    task = config.task
    try:
        source = factories.task_source(task, config.seed)
    except protocols.DataError:
        if not task.path or Path(task.path).exists():
            raise
        return [f"tasks       {task.source} ({task.path} is not here)"]
    count = f"{len(source):,} to train on" if isinstance(source, Sized) else "generated"
    count += source.describe() if isinstance(source, datasets.FileTasks) else ""
    file = f" from {task.path}" if task.path else ""
    first = textwrap.shorten(_question(source.task(0).payload), PROMPT_CHARACTERS, placeholder=" ...")
    lines = [f"tasks       {task.source}{file}, {count}; the first: {first}"]
    if task.source == f"{datasets.__name__}:task_source":
        named = repr({"prompt_column": "prompt", "answer_column": "answer", **task.arguments})
        names = next(tables.rows(task.path, (), task.arguments.get("split", "train"))).values
        unread = [repr(name) for name in names if repr(name) not in named and f"'{name}." not in named]
        lines += [f"  unread    {', '.join(unread)}: no task has these columns"] if unread else []
    return lines


def _prompt(config: config_lib.RunConfig, posed: rehearsal.Posed) -> list[str]:
    """Describes the tools, and shows the first prompt as the tokenizer writes it."""
    where = "in the system message" if config.tools.describe else "not described: config.tools.describe is off"
    tools = f"{', '.join(posed.tools)} ({config.tools.format} calls; {where})" if posed.tools else "none of tools.use"
    text = "\n".join(f"{message.role}: {message.content}" for message in posed.messages)
    try:
        tokenizer = tokenizers.create(config.task, config.model.path, incremental=False)
    except protocols.LibraError:  # the tokenizer is not on this machine
        title = "the first, without the chat template, which is not here"
    else:
        try:
            tokens = tokenizer.render(list(posed.messages), first=True, generation_prompt=True)
            text, title = tokenizer.decode(tokens), f"the first, as the policy sees it ({len(tokens):,} tokens)"
        except protocols.LibraError as error:  # a run replaces such a task
            title = f"the first, which the chat template refuses ({error})"
    lines = [f"  | {line}" for line in limits.cut(text, PROMPT_SHOWN).splitlines()]
    return [f"tools       {tools}", f"prompt      {title}:", *lines]


def _question(payload: Mapping[str, Any]) -> str:
    """Returns the text of a task's question.

    Only the environment knows what the policy sees, and a dry run starts none. The names are those of the questions of
    environments that ship; any other payload is shown whole.
    """
    text = next((payload[name] for name in ("prompt", "question", "expression", "issue") if name in payload), payload)
    # Of a prompt of several messages the last one asks. A payload of a user's own may have any other shape.
    if isinstance(text, list) and text and isinstance(text[-1], Mapping) and "content" in text[-1]:
        text = text[-1]["content"]
    plain = dict(text) if isinstance(text, Mapping) else text
    return plain if isinstance(plain, str) else json.dumps(plain, default=str)


EXAMPLE = "for the first task with its own answer"
"""What the reward functions are tried on, in a sentence."""


def example(config: config_lib.RunConfig) -> trial.TrialRollout | None:
    """Returns a rollout that answers the first task as the task's `answer` says; None if the tasks are not here."""
    try:
        task = factories.task_source(config.task, config.seed).task(0)
    except protocols.DataError:
        return None
    answer = answers.accepted(task.payload)[0] if task.payload.get("answer") not in (None, []) else ""
    question = _question(task.payload)
    messages = protocols.Message("user", question), protocols.Message("assistant", answer)
    # As the run's tokenizer writes it, because a reward function may look for the tokens of the chat template.
    try:
        tokenizer = tokenizers.create(config.task, config.model.path, incremental=False)
        prompt = tokenizer.render(messages[:1], first=True, generation_prompt=True)
        question = tokenizer.decode(prompt)
        dialogue = tokenizer.decode([*prompt, *tokenizer.encode(answer), tokenizer.stop_token_ids[0]])
    except protocols.LibraError:  # the tokenizer is not on this machine
        dialogue = f"{question}\n{answer}"
    right = scoring.Transcript(answer, answer, messages=messages, environment_reward=1.0, dialogue=dialogue)
    silent = scoring.Transcript("", messages=messages[:1], environment_reward=0.0, dialogue=question)
    return trial.TrialRollout(task, right, silent)


def try_rewards(config: config_lib.RunConfig) -> None:
    """Makes the reward functions and has the user's own ones score `example`, in a child process.

    Prints a warning for each function that pays for an empty output.

    Raises:
      ConfigError: a run would fail with a function, because it raises or gives no finite number.
      LibraError: the first task cannot be read.
    """
    if not config.reward.functions:
        return
    reward_results = trial.functions(config.reward, example(config))
    surely, _ = failures(config, reward_results)
    if surely:
        raise protocols.ConfigError("; ".join(surely))
    for sentence in unearned(reward_results):
        print(f"warning: {sentence}.", file=sys.stderr)


def unearned(reward_results: Sequence[trial.Scored]) -> list[str]:
    """Returns sentences for the reward functions that pay for an empty output to the first task, or fail with it."""
    return [
        f"config.reward.functions.{one.name}: {one.silent.problem or f'gave {one.silent.value:g}'} for the first task "
        "with an empty output, which a policy may write"
        for one in reward_results
        if one.silent is not None and not one.outcome.problem and (one.silent.problem or one.silent.value > 0)
    ]


def failures(config: config_lib.RunConfig, reward_results: Sequence[trial.Scored]) -> tuple[list[str], list[str]]:
    """Returns sentences for the reward functions that a run would fail with, and for those that it might fail with."""
    surely, perhaps = [], []
    for one in reward_results:
        function = config.reward.parsed()[one.name]
        called = resolving.shown(function.factory, function.arguments)
        sentence = f"config.reward.functions.{one.name}: {called} {one.outcome.problem} {EXAMPLE}"
        if one.failed:
            surely.append(sentence)
        elif one.outcome.problem:
            why = "a run waits longer" if one.slow else "the transcript is made up here, so a real one may fare better"
            perhaps.append(f"{sentence}; {why}")
    return surely, perhaps + unearned(reward_results)
