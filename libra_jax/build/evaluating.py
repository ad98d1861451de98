"""Evaluates a run's checkpoint or a model with several attempts a task: pass@k with intervals, a table and a picture.

The work of launch/evaluate.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import api, objects, workdirs
from libra_jax.coordinator import checkpoint_store, evaluation, scores
from libra_jax.models.hf import hub
from libra_jax.rollouts import factories
from libra_jax.simulator import report
from libra_jax.utils import checksums, resolving

FILE, PICTURE = "evaluation.json", "evaluation.svg"
"""Names of the files in the output folder."""

RESAMPLES = 10_000
"""Number of resamples of the tasks from which an interval is read."""

LEVEL = 0.95
"""Chance with which an interval is to hold the true value."""

MOST_LINES = 40
"""Most tasks in the printed table; the JSON file has all of them."""

MOST_TICKS = 10
"""Most labelled values of k in the picture."""

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class EvaluationRequest:
    """What the flags of launch/evaluate.py ask for. None leaves a value to the config.

    Attributes:
      workdir: folder of a run.
      step: training step of the run's checkpoint; None is the newest, or the export if there is no checkpoint.
      model: Hugging Face directory or id, instead of a run's folder.
      tasks: file or dataset of tasks, instead of the held-out tasks of the config.
      most_tasks: most tasks that are evaluated.
      attempts: attempts at each task.
      k: values of k for pass@k; empty: powers of two up to the attempts.
      threshold: reward from which on an attempt counts as solved.
      temperature: sampling temperature.
    """

    workdir: Path | None = None
    step: int | None = None
    model: str | None = None
    tasks: str | None = None
    most_tasks: int | None = None
    attempts: int | None = None
    k: tuple[int, ...] = ()
    threshold: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its interval.

    Attributes:
      value: mean over the tasks.
      low: lower end of the interval.
      high: upper end of the interval.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}  [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class EvaluationReport:
    """The result of an evaluation.

    Attributes:
      source: what was evaluated, for titles.
      tasks: scores of each task.
      attempts: attempts at each task.
      threshold: reward from which on an attempt counts as solved.
      temperature: sampling temperature.
      reward: mean reward.
      pass_at: pass@k by k.
      metrics: further means over the rollouts, as in `metrics.jsonl`.
    """

    source: str
    tasks: Sequence[scores.TaskScores]
    attempts: int
    threshold: float
    temperature: float
    reward: Estimate
    pass_at: dict[int, Estimate]
    metrics: dict[str, float]


def evaluate(request: EvaluationRequest, explicit_config: config_lib.RunConfig | None) -> EvaluationReport:
    """Rolls out all attempts with the config's own environments and engines, and estimates.

    Args:
      request: what to evaluate, and how.
      explicit_config: config of --config; None takes the one of the run's folder.
    """
    config, checkpoint, source = chosen(request, explicit_config)
    config = _with_flags(config, request)
    k = _checked_k(request, config.evaluation.attempts)
    config = _with_tasks(located(config, request), request)
    with resolving.contain_task_exits():
        result, _ = asyncio.run(api.score(config, checkpoint))
    return estimated(result.scores, config.evaluation, k, source, result.metrics)


def estimated(
    tasks: Sequence[scores.TaskScores],
    settings: config_lib.EvaluationConfig,
    k: Sequence[int],
    source: str,
    metrics: dict[str, float],
) -> EvaluationReport:
    """Estimates mean reward and pass@k with their intervals. A task with fewer than k scored attempts has no pass@k."""
    rewards = [one.mean for one in tasks if one.rewards]
    pass_at = {}
    for k_value in k:
        values = [value for one in tasks if (value := one.pass_at(k_value, settings.threshold)) is not None]
        if values:
            pass_at[k_value] = interval(values)
    return EvaluationReport(
        source,
        tasks,
        settings.attempts,
        settings.threshold,
        settings.temperature,
        interval(rewards),
        pass_at,
        metrics,
    )


def interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """Returns the mean with its percentile bootstrap interval over the values, one of each task.

    Tasks are drawn with replacement, and attempts are not: the interval says what other tasks of the same kind would
    give. If all values are equal, it has no width.
    """
    array, generator = np.asarray(values, np.float64), np.random.default_rng(seed)
    count = len(array)
    # A resample is how often each task was drawn. In parts, because counts of thousands of tasks take gigabytes.
    parts = [
        generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES // 20) @ array / count for _ in range(20)
    ]
    low, high = np.quantile(np.concatenate(parts), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(array.mean()), float(low), float(high))


# What is evaluated ----------------------------------------------------------------------------------------------------


def chosen(
    request: EvaluationRequest, explicit_config: config_lib.RunConfig | None
) -> tuple[config_lib.RunConfig, checkpoint_store.Stored | None, str]:
    """Returns config, checkpoint (None: the config's model) and title."""

    def need(right: bool, problem: str) -> None:
        if not right:
            raise protocols.ConfigError(problem)

    need(
        (request.workdir is None) != (request.model is None),
        "--workdir: give either --workdir=RUN, or --model=DIR with --config=FILE, not both and not neither",
    )
    if request.model is not None:
        need(explicit_config is not None, "--model: needs --config=FILE, which names tasks, environment and engine")
        need(request.step is None, "--step: chooses a checkpoint of --workdir, and --model is one set of weights")
        assert explicit_config is not None
        model = dataclasses.replace(explicit_config.model, path=request.model)
        return dataclasses.replace(explicit_config, model=model), None, request.model
    assert request.workdir is not None
    need(
        explicit_config is None,
        f"--config: --workdir={request.workdir} has its own config; leave --config out, or evaluate "
        f"--model={request.workdir / 'model'} with it",
    )
    config = read_config(request.workdir)
    if request.step is not None:
        counting = checkpoint_store.counting(request.workdir)
        steps = ", ".join(map(str, sorted(counting))) or "none"
        need(request.step in counting, f"--step={request.step}: {request.workdir} has checkpoints of steps {steps}")
        stored = checkpoint_store.checked(request.workdir, counting[request.step])
        return config, stored, f"{config.name}, step {request.step}"
    newest = workdirs.newest(request.workdir)
    if newest.stored is not None:
        api.tell_skipped(newest)
        return config, newest.stored, f"{config.name}, step {newest.step}"
    export = request.workdir / "model"
    if not any(export.glob("*.safetensors")):
        raise protocols.DataError(
            f"--workdir={request.workdir}: holds no checkpoint and no exported model yet; name a run that has written "
            "one"
        )
    print(f"note: {request.workdir} has no checkpoint, so its export {export} is evaluated.", file=sys.stderr)
    # An export of a run with an adapter holds the merged weights.
    merged = dataclasses.replace(config.model, path=str(export), lora=config_lib.LoraConfig())
    return dataclasses.replace(config, model=merged), None, f"{config.name}, exported model"


def read_config(workdir: Path) -> config_lib.RunConfig:
    """Reads the config that a run was begun with.

    Raises:
      DataError: the folder has none that this version can read.
    """
    path = workdir / CONFIG_FILE
    try:
        values = checksums.read_object(path)
        # A run of an earlier version may use names that have changed since.
        return config_lib.parse(config_lib.RunConfig, config_lib.renamed(values))
    except OSError as error:
        raise protocols.DataError(
            f"--workdir={workdir}: holds no {CONFIG_FILE} ({error.strerror or error}); give the folder of a run"
        ) from error
    except (ValueError, AttributeError, RecursionError, protocols.ConfigError) as error:
        raise protocols.DataError(f"--workdir={workdir}: {path} is no config of this version ({error})") from error


def _with_flags(config: config_lib.RunConfig, request: EvaluationRequest) -> config_lib.RunConfig:
    """Returns the config with the flags' settings of the evaluation; an error names the flag."""
    flags = {
        name: value
        for name in ("attempts", "threshold", "temperature")
        if (value := getattr(request, name)) is not None
    }
    try:
        settings = dataclasses.replace(config.evaluation, **flags)
    except protocols.ConfigError as error:
        sentence = str(error)
        for name in ("attempts", "threshold", "temperature"):
            sentence = sentence.replace(f"config.evaluation.{name}", f"--{name}").replace(
                f"evaluation.{name}", f"--{name}"
            )
        raise protocols.ConfigError(sentence) from error
    return dataclasses.replace(config, evaluation=settings)


def _checked_k(request: EvaluationRequest, attempts: int) -> tuple[int, ...]:
    """Returns the values of k. Refuses those that the attempts do not estimate."""
    k = tuple(sorted(set(request.k))) or scores.usual_k(attempts)
    if k[0] < 1:
        raise protocols.ConfigError(f"--k={k[0]}: must be positive; write it as --k=1,4,8")
    if k[-1] > attempts:
        raise protocols.ConfigError(
            f"--k={k[-1]}: {attempts} attempts a task give no estimate of pass@{k[-1]}; set --attempts to {k[-1]} or "
            "more, or lower --k"
        )
    return k


def located(config: config_lib.RunConfig, request: EvaluationRequest) -> config_lib.RunConfig:
    """Returns the config with the path of --tasks, and with local paths instead of Hugging Face ids."""
    if request.tasks is not None:
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, path=request.tasks))
    resolution = hub.resolved(config, download=True)
    if resolution.problems:
        raise protocols.DataError("; ".join(resolution.problems))
    if request.model is not None and not any(Path(resolution.config.model.path).glob("*.safetensors")):
        is_folder = Path(resolution.config.model.path).is_dir()
        there = "holds no *.safetensors" if is_folder else "there is no such directory"
        raise protocols.DataError(
            f"--model={request.model}: {there}; give a directory of weights, or a Hugging Face id"
        )
    return resolution.config


# Tasks ----------------------------------------------------------------------------------------------------------------


def _with_tasks(config: config_lib.RunConfig, request: EvaluationRequest) -> config_lib.RunConfig:
    """Returns the config with a source of the tasks to evaluate, each of them once.

    An interval over tasks would be too narrow if a source that begins again past its end gave some tasks twice.
    """
    if request.most_tasks is not None and request.most_tasks < 1:
        raise protocols.ConfigError(f"--most_tasks={request.most_tasks}: must be positive")
    tasks = _tasks_of_file(config, request) if request.tasks is not None else _held_out(config, request)
    listed = evaluation.distinct(tasks, lambda sentence: print(f"--tasks: {sentence}.", file=sys.stderr))
    name = resolving.give(lambda seed: objects.Listed(listed), "task.source", name="evaluated", text=str(len(listed)))
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, source=name, path="", arguments={}),
        evaluation=dataclasses.replace(config.evaluation, tasks=len(listed)),
    )


def _held_out(config: config_lib.RunConfig, request: EvaluationRequest) -> list[protocols.Task]:
    """Returns the first held-out tasks of the config's source."""
    source = factories.task_source(config.task, config.seed)
    try:
        with resolving.named(config.task.source, "task.source", "evaluation_task"):
            return [source.evaluation_task(index) for index in range(request.most_tasks or config.evaluation.tasks)]
    except protocols.DataError as error:
        raise protocols.DataError(
            f"--tasks: none is given, and the run holds no task out ({str(error).partition(';')[0]}); give the tasks "
            "to evaluate as --tasks=FILE"
        ) from error


def _tasks_of_file(config: config_lib.RunConfig, request: EvaluationRequest) -> list[protocols.Task]:
    """Returns the tasks of --tasks, read by the config's own source: all of them, unless the source holds some out."""
    try:
        try:  # nothing is trained, so nothing has to be held out
            every = dataclasses.replace(config.task, arguments={**config.task.arguments, "holdout": 0.0})
            source: Any = factories.task_source(every, config.seed)
        except protocols.ConfigError:
            source = factories.task_source(config.task, config.seed)
    except protocols.LibraError as error:
        sentence = str(error).removeprefix("config.task.path: ").replace("config.task.path", "--tasks")
        raise type(error)(f"--tasks={request.tasks}: {sentence}") from error
    with resolving.named(config.task.source, "task.source", "a task"):
        if hasattr(source, "__len__"):
            return [source.task(index) for index in range(min(len(source), request.most_tasks or len(source)))]
        return [source.evaluation_task(index) for index in range(request.most_tasks or config.evaluation.tasks)]


# What is shown --------------------------------------------------------------------------------------------------------


def table(result: EvaluationReport) -> str:
    """Returns a line for each task, the least solved first, and the estimates with their intervals."""
    tasks = sorted(result.tasks, key=lambda one: one.mean if one.rewards else -1.0)
    rows = [("task", "solved", "mean reward")]
    for one in tasks[:MOST_LINES]:
        solved = f"{one.solved(result.threshold)}/{len(one.rewards)}"
        rows.append((one.task, solved, f"{one.mean:.3f}" if one.rewards else "not scored"))
    width = max(len(row[0]) for row in rows)
    lines = [f"{name:{width}}  {solved:>7}  {reward:>11}" for name, solved, reward in rows]
    if len(tasks) > MOST_LINES:
        lines.append(f"... and {len(tasks) - MOST_LINES} tasks more, in {FILE}")
    attempts = f"{result.attempts} attempts" if result.attempts > 1 else "1 attempt"
    lines += ["", f"{result.source}: {len(tasks)} tasks, {attempts} each, temperature {result.temperature:g}"]
    lines += [f"{'mean reward':12} {result.reward}"]
    lines += [f"{f'pass@{k}':12} {estimate}" for k, estimate in result.pass_at.items()]
    lines.append(
        f"[in brackets: {LEVEL:.0%} bootstrap intervals over tasks; solved: reward at least {result.threshold:g}]"
    )
    if unscored := sum(one.unscored for one in tasks):
        lines.append(f"{unscored} rollouts are left out, because their environment kept crashing")
    return "\n".join(lines)


def to_json(result: EvaluationReport) -> str:
    """Returns the estimates and every task's rewards as JSON."""
    record = {
        "source": result.source,
        "attempts": result.attempts,
        "threshold": result.threshold,
        "temperature": result.temperature,
        "interval": LEVEL,
        "reward": dataclasses.asdict(result.reward),
        "pass_at": {str(k): dataclasses.asdict(estimate) for k, estimate in result.pass_at.items()},
        "metrics": result.metrics,
        "tasks": [
            {
                "task": one.task,
                "solved": one.solved(result.threshold),
                "rewards": list(one.rewards),
                "unscored": one.unscored,
            }
            for one in result.tasks
        ],
    }
    return json.dumps(record, indent=1) + "\n"


def write(result: EvaluationReport, folder: Path) -> None:
    """Writes the JSON file and the picture into the output folder.

    Raises:
      DataError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(to_json(result))
        write_picture(result, folder / PICTURE)
    except OSError as error:
        raise protocols.DataError(f"--output: {folder} cannot be written ({error.strerror or error})") from error


def write_picture(result: EvaluationReport, path: Path) -> None:
    """Draws pass@k with its intervals over k, and how many tasks had how many of their attempts solved."""
    title = [result.source, f"{len(result.tasks)} tasks, {result.attempts} attempt{'s' * (result.attempts > 1)} each"]
    with report.picture_axes(path, 4.4, title, rows=(1.4, 1.0)) as (above, below):
        k = list(result.pass_at)
        values = [estimate.value for estimate in result.pass_at.values()]
        errors = [
            [estimate.value - estimate.low for estimate in result.pass_at.values()],
            [estimate.high - estimate.value for estimate in result.pass_at.values()],
        ]
        above.errorbar(range(len(k)), values, yerr=errors, fmt="o-", color="#4c78a8", capsize=4, label="pass@k")
        above.axhline(result.reward.value, color="#54a24b", linestyle="--", linewidth=1.2, label="mean reward")
        every = -(-len(k) // MOST_TICKS)  # labels that stand too close run into each other
        above.set_xticks(range(0, len(k), every), [str(k_value) for k_value in k[::every]])
        above.set(xlabel="k", xlim=(-0.5, len(k) - 0.5))
        solved = [one.solved(result.threshold) for one in result.tasks if one.rewards]
        counts = np.bincount(solved, minlength=result.attempts + 1)
        below.bar(range(len(counts)), counts, color="#4c78a8")
        below.set(xlabel="solved attempts of a task", ylabel="tasks")
        for axis in (below.xaxis, below.yaxis):
            axis.get_major_locator().set_params(integer=True, nbins=MOST_TICKS)
