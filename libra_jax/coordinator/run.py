"""Runs rollout, training, weight sync, evaluation and checkpoints in one loop, synchronous and asynchronous alike.

All times come from the running event loop, because the simulator runs this same code on a virtual clock.
"""

from __future__ import annotations

import collections
import contextlib
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from libra_jax import protocols
from libra_jax.coordinator import (
    checkpoint_store,
    checkpoints,
    elasticity,
    evaluation,
    fencing,
    parts,
    reports,
    stopping,
)
from libra_jax.rollouts import rollouts
from libra_jax.trainer_control import handover
from libra_jax.utils import deadlines

OLDER = "verify older checkpoints"
"""Name of the background task that verifies older checkpoints."""


@dataclass
class RunSummary:
    """The result of a run.

    Attributes:
      steps: training steps taken, including those before a resume.
      policy_version: version trained last.
      trained: number of groups trained.
      replaced: number of groups replaced, by reason.
      replaced_rollouts: number of rollouts of replaced groups.
      rewards: mean reward of each step of this session, by step.
      accuracies: held-out accuracy of each evaluation of this session, by version.
      stopped: True if a person or a scheduler stopped the run before its last step.
      terminated: True if a scheduler stopped it with SIGTERM. The same command then continues the run.
      sentence: summary for the person who runs it.
    """

    steps: int = 0
    policy_version: int = 0
    trained: int = 0
    replaced: dict[str, int] = field(default_factory=dict)
    replaced_rollouts: int = 0
    rewards: dict[int, float] = field(default_factory=dict)
    accuracies: dict[int, float] = field(default_factory=dict)
    stopped: bool = False
    terminated: bool = False
    sentence: str = ""


class Coordinator:
    """Runs the whole training of a config; made once, run once.

    Args:
      context: what the parts of the run share.
      planner: decides who trains and who rolls out; None leaves everything as it is.
    """

    def __init__(
        self,
        context: parts.CoordinatorContext,
        specs: parts.WorkerSpecs,
        agent: rollouts.Agent,
        scheduler: protocols.Scheduler,
        planner: elasticity.Planner | None = None,
    ) -> None:
        self._context = context
        self._specs = specs
        self._agent = agent
        self._scheduler = scheduler
        self._planner = planner
        self._fencing = context.fencing
        self._config = context.config
        self._recorder = context.recorder
        self._workdir = context.workdir
        self._ending = context.scope
        self._clock = context.clock
        self._trainer_name = specs.trainer.name
        self._warm_start = evaluation.WarmStart(context.config, agent)
        self._summary = RunSummary()
        # True once workers are up and the checkpoint, if any, has been restored: from then on a stop can save one.
        self._ready = False
        # Training steps taken, which is also the trainer's version.
        self._step = 0
        self._evaluated = protocols.NO_VERSION
        # True after this start's first training step, which compiles the programs.
        self._compiled = False
        # What earlier steps have reported of the groups' growing counts.
        self._reported: collections.Counter[str] = collections.Counter()
        self._reported_tokens = 0
        self._learning = reports.Watch(context.config, context.recorder.note)

    # The life of a run ------------------------------------------------------------------------------------------

    async def run(self, at_signal: stopping.AtOnce = lambda _: None) -> RunSummary:
        """Trains from the newest checkpoint, or from the start, to the last step, and closes everything it opened.

        SIGINT stops the run after the training step under way, with a checkpoint. SIGTERM does so within
        `deadlines.grace`.

        Args:
          at_signal: hears of SIGINT and SIGTERM at once.

        Raises:
          LibraError: the error that ended the run, in one sentence.
        """
        self._workers = parts.RunWorkers(self._context, self._specs)
        self._stopping = stopping.Stopping(self._context, self._ending, self._abort_step)
        # A killed run may have left one.
        self._remove_snapshot()
        search = await deadlines.within(
            self._config.deadlines.checkpoint,
            deadlines.off_loop(checkpoint_store.find, self._workdir),
            f"Verifying the checkpoints in {self._workdir / checkpoint_store.FOLDER}",
            "checkpoint",
            look="see whether its disk answers",
        )
        newest = search.step
        for sentence in [*fencing.damaged(self._workdir), *search.skipped]:
            self._recorder.note(sentence)
        if newest >= 0:
            self._recorder.note(search.sentence())
        # All steps are taken and exported: no worker needs to start.
        if newest >= self._config.steps and (
            self._context.export is None or checkpoints.is_exported(self._workdir, newest, self._context.export)
        ):
            self._step = newest
            self._summarise(
                f"This run has taken its {newest} steps already: nothing is left to do. More config.steps go on from "
                "there."
            )
            return self._summary
        with stopping.caught(self._stopping.stop, at_signal) as catch_again:
            try:
                if self._fencing is not None:
                    self._ending.start(fencing.watch(self._fencing), "fencing_token")
                await self._run(search.stored, catch_again)
            finally:
                await self._close()
        return self._summary

    def request_stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Stops the run with a checkpoint, as the signal does (`run`)."""
        self._stopping.stop(number)

    async def _run(self, newest: checkpoint_store.Stored | None, catch_again: Callable[[], None]) -> None:
        try:
            replanned = newest is not None and self._workers.take_up_plan(self._planner, newest)
            await self._ending.race(self._workers.start())
            catch_again()
            self._parts = parts.wire(
                self._context,
                self._agent,
                self._scheduler,
                self._planner,
                workers=self._workers,
                state=self._state,
            )
            if newest is not None:
                self._ending.start(self._verify_older(newest.step), OLDER)
                await self._restore(newest)
            self._parts.recovery.watch()
            if replanned and (follower := self._parts.elastic.follower) is not None:
                follower.begin()
            self._ready = True
            await self._open()
            while self._step < self._config.steps:
                await self._train_one_step()
            await self._finish()
        except stopping.Stopped:
            await self._stop()
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            self._stopping.lost(error)
            await self._stop()

    async def _verify_older(self, before: int) -> None:
        """Verifies older checkpoints in the background, to which the run would fall back."""
        # They may be removed meanwhile.
        with contextlib.suppress(OSError, protocols.DataError):
            for sentence in await deadlines.off_loop(checkpoint_store.damaged, self._workdir, before):
                self._recorder.note(sentence)

    async def _restore(self, stored: checkpoint_store.Stored) -> None:
        """Restores a checkpoint. Groups that were in flight resume; they get tokens after the first weight sync."""
        state, step = await self._parts.recovery.through(lambda: self._parts.saver.restore(stored)), stored.step
        self._recorder.note(f"Going on from the checkpoint at step {step}.")
        steps, schedule = self._config.steps, self._config.optimizer.schedule
        if schedule != "constant" and state.get("planned_steps", steps) != steps:
            self._recorder.note(
                f"The {schedule} learning-rate schedule now ends at step {steps} and no longer at step "
                f"{state['planned_steps']} (config.steps): the rate jumps to where a run of {steps} steps has it."
            )
        self._step = self._parts.batches.next_step = step
        self._evaluated = state["evaluated"]
        self._parts.batches.data_position = state["data_position"]
        if (held_prompts := state.get("prompts")) is not None:  # checkpoints of earlier versions lack it
            self._parts.prompts.restore(held_prompts)
        if (held_replay := state.get("replay")) is not None:
            self._parts.replays.restore(held_replay)
        self._warm_start.taken = state["warm_start_steps"]
        self._scheduler.restore(state["scheduler"])
        if (workers := self._parts.elastic.hybrid) is not None and (hybrid_state := state.get("hybrid")) is not None:
            workers.restore(hybrid_state)
        self._parts.groups.restore(state["groups"])
        # The steps before the restart have reported these replacements.
        self._reported, self._reported_tokens = self._parts.groups.replaced.copy(), self._parts.groups.replaced_tokens
        await self._ending.race(self._parts.groups.teach())

    def _state(self) -> checkpoints.CoordinatorState:
        """Returns the coordinator's part of a checkpoint."""
        workers = self._parts.elastic.hybrid
        return {
            "step": self._step,
            "planned_steps": self._config.steps,
            "evaluated": self._evaluated,
            "data_position": self._parts.batches.data_position,
            "prompts": self._parts.prompts.state(),
            "replay": self._parts.replays.state(),
            "warm_start_steps": self._warm_start.taken,
            "scheduler": dict(self._scheduler.snapshot()),
            "allocation": [{"name": item.name, "slots": item.slots} for item in self._workers.engines.serving()],
            "groups": self._parts.groups.state(),
            "records": self._recorder.records(),
            "planner": None if self._planner is None else dict(self._planner.snapshot()),
            "hybrid": None if workers is None else workers.snapshot(),
        }

    async def _open(self) -> None:
        """Finishes the warm start, syncs the weights, and evaluates the policy if no evaluation has been made."""
        name, begin, here = self._trainer_name, self._clock(), self._parts

        async def take(batch: list[protocols.Trajectory]) -> Mapping[str, float]:
            async with here.trainer.lock:
                metrics = await here.trainer.warm_start_step(batch)
                here.recovery.warmed(self._warm_start.taken, batch)
                return metrics

        report = await self._warm_start.run(
            lambda batch: here.recovery.through(lambda: take(batch)),
            self._ending,
            lambda text: self._recorder.status(name, text),
        )
        if report:
            self._recorder.span(name, "warm start", begin, self._clock())
        await self._ending.race(self._sync_weights())
        # Rollout begins with the first weight sync.
        self._step_began = self._clock()
        report |= await self._evaluate_if_due()
        if report:
            self._recorder.metrics(self._step, {"policy_version": self._step, **report})
        if self._step == 0 and self._warm_start.taken:
            await here.recovery.through(lambda: here.saver.at_step(0))

    # One step ---------------------------------------------------------------------------------------------------

    async def _train_one_step(self) -> None:
        times, waiting_since = reports.StepTimes(), self._clock()
        # A stop during the wait loses nothing: the groups stay with `groups`.
        batch = await self._ending.race(self._parts.batches.next())
        begin, before = self._clock(), self._parts.recovery.seconds
        ahead = self._parts.stream.take_seconds()
        times.wait = begin - waiting_since - ahead
        self._stopping.in_step = True
        try:
            # A person's stop waits for the step's end. A scheduler's stop aborts the step if time runs out.
            metrics = await self._ending.race(self._train(batch), through_stop=True)
        except protocols.StepAborted:
            self._parts.groups.put_back(batch.groups)
            self._recorder.note(f"The step after {self._step} was aborted: its {len(batch.groups)} groups wait again.")
            self._ending.check()
            raise
        finally:
            self._stopping.in_step = False
        # A restart of the trainer within the step is reported as recovery, not as training time.
        times.ahead = ahead
        times.train = ahead + self._clock() - begin - (self._parts.recovery.seconds - before)
        flops = self._workers.peak_flops
        report = reports.StepReport(
            self._step - 1,
            batch.groups,
            metrics,
            times,
            begun_groups=len(batch.begun),
            task=self._config.task,
            peak_flops=flops,
        )
        try:
            times.sync = await self._ending.race(self._sync_weights())
            report.sync_bytes = self._parts.weight_sync.nbytes
            report.sync_paused = self._parts.weight_sync.paused_seconds
            report.sync_sent = self._parts.weight_sync.sent_bytes, self._parts.weight_sync.whole_bytes
            report.evaluation = await self._evaluate_if_due()
        finally:
            self._record(report)
        await self._parts.recovery.through(lambda: self._parts.saver.at_step(self._step))
        self._ending.check()

    async def _train(self, batch: protocols.TrainBatch) -> Mapping[str, float]:
        """Trains on a batch, again on the same one if the trainer is lost meanwhile. Returns the trainer's metrics."""
        name, begin = self._trainer_name, self._clock()
        trainer, elastic = self._parts.trainer, self._parts.elastic
        while True:
            try:
                async with trainer.lock:
                    await self._parts.resizing.boundary(self._step)
                    # The trainer that was to abort the step may have been restarted meanwhile.
                    if not self._stopping.seconds_until(stopping.STEP):
                        raise protocols.StepAborted("a scheduler leaves no time for the step")
                    # The trainer compiles its programs in the first step that it takes in this process.
                    compiling = "" if self._compiled else ", compiling its programs first"
                    self._recorder.status(name, f"training step {self._step + 1}{compiling}")
                    shares, start = elastic.begin_step(batch), self._clock()
                    try:
                        metrics = await trainer.train_step(batch, shares)
                    except protocols.TrainerLost:
                        await elastic.end_step(shares, None, 0.0)
                        raise
                    await elastic.end_step(shares, metrics, self._clock() - start)
                    self._parts.recovery.trained(batch)
                    self._compiled = True
                    # Still under the lock, so that an engine that catches up asks for the version that the trainer
                    # holds.
                    self._step += 1
                    self._parts.weight_sync.version = self._step
                break
            except protocols.TrainerLost as error:
                begin = await self._parts.recovery.restarted(error)
        self._parts.groups.trained += len(batch.groups)
        self._recorder.span(name, "train step", begin, self._clock(), {"step": self._step})
        self._recorder.status(name, "idle")
        return metrics

    async def _sync_weights(self) -> float:
        seconds = await self._parts.recovery.through(lambda: self._parts.weight_sync.sync_weights(self._step))
        self._parts.batches.admit()
        return seconds

    async def _evaluate_if_due(self) -> dict[str, float]:
        every = self._config.evaluation.every
        if not every or self._evaluated == self._step or (self._step % every and self._step < self._config.steps):
            return {}
        begin = self._clock()
        self._recorder.status("rollout", f"evaluating version {self._step}")
        work = evaluation.evaluate(
            self._config,
            runner=self._parts.runner,
            tasks=self._agent.tasks,
            version=self._step,
            status=lambda text: self._recorder.status("rollout", text),
        )
        result = await self._ending.race(work)
        end = self._clock()
        self._evaluated = self._step
        self._summary.accuracies[self._step] = result.metrics["evaluation/accuracy"]
        self._recorder.span("coordinator", "evaluation", begin, end, {"policy_version": self._step})
        if self._context.samples is not None:
            for record in self._context.samples.of_evaluation(self._step, result.rollouts):
                self._recorder.sample(record)
        return {**result.metrics, "evaluation/seconds": end - begin}

    def _record(self, report: reports.StepReport) -> None:
        """Completes a step's report with what its parts counted, decides on elastic changes, and records it all."""
        replaced = self._parts.groups.replaced - self._reported
        report.replaced, report.replaced_tokens = replaced, self._parts.groups.replaced_tokens - self._reported_tokens
        self._reported, self._reported_tokens = self._parts.groups.replaced.copy(), self._parts.groups.replaced_tokens
        report.voids = self._parts.runner.take_voids()
        report.streams = self._parts.runner.take_counts()
        report.scheduling_seconds = self._parts.dispatcher.take_seconds()
        report.routing = self._parts.dispatcher.routing.take_counts()
        report.times.step = self._clock() - self._step_began
        report.times.rollout = self._parts.groups.busy_seconds()
        report.times.checkpoint = self._parts.saver.take_seconds()
        report.rollout_devices = sum(instance.tensor_parallel for instance in self._workers.engines.serving())
        report.replay = self._parts.replays.metrics()
        report.plan = self._parts.elastic.after(self._step, report)
        metrics = {**report.metrics(), **self._parts.recovery.take_metrics()}
        for group in report.groups:
            for trajectory in group.rollouts:
                self._recorder.trajectory(reports.trace_record(trajectory, group, report.version + 1))
        if self._context.samples is not None:
            for record in self._context.samples.of_step(self._step, report.groups):
                self._recorder.sample(record)
        self._recorder.metrics(self._step, metrics)
        self._learning.look(self._step, metrics)
        self._summary.rewards[self._step] = metrics["reward/mean"]
        self._step_began = self._clock()

    # The end ----------------------------------------------------------------------------------------------------

    async def _abort_step(self) -> None:
        """Asks the trainer to abort the step under way, when a scheduler leaves no time for it."""
        # Recovery repeats lost steps, and no checkpoint is possible without them.
        if self._parts.recovery.under_way:
            return
        # A lost trainer is in no step.
        with contextlib.suppress(protocols.TrainerLost):
            await self._parts.trainer.abort_step()

    async def _finish(self) -> None:
        """Saves the last checkpoint and exports the policy, each again if the trainer is lost meanwhile."""
        here, folder = self._parts, self._context.export
        await here.recovery.through(lambda: here.saver.now(self._step))
        if folder is not None:
            # A superseded run must not overwrite the export of its successor.
            if self._fencing is not None:
                self._fencing.check()

            async def export() -> None:
                async with here.trainer.lock:
                    await here.trainer.export(str(folder))

            await here.recovery.through(export)
        plural = "" if self._step == 1 else "s"
        replaced = here.groups.replaced_text()
        self._summarise(
            f"Trained {self._step} step{plural} on {here.groups.trained} groups."
            + (f" {replaced}." if replaced else "")
        )

    async def _stop(self) -> None:
        """Saves a checkpoint while there is time for it, and says from where the same command goes on."""
        self._summary.stopped, self._summary.terminated = True, self._stopping.terminated
        if not self._ready:
            self._summarise("Stopped before training began or went on; nothing is lost.")
            return
        if not self._config.checkpoint.every:
            self._summarise(f"Stopped at step {self._step} without a checkpoint: config.checkpoint.every is 0.")
            return
        saving = self._parts.recovery.through(lambda: self._parts.saver.now(self._step))
        if not (why := await self._stopping.unsaved(saving)):
            self._summarise(f"Stopped at step {self._step}; the same command goes on from the checkpoint there.")
        else:
            newest = checkpoints.newest_step(self._workdir)
            goes_on = f"goes on from the checkpoint at step {newest}" if newest >= 0 else "begins again: there is none"
            self._summarise(f"Stopped at step {self._step}, whose checkpoint {why}; the same command {goes_on}.")

    def _summarise(self, sentence: str) -> None:
        summary = self._summary
        summary.steps = summary.policy_version = self._step
        summary.sentence = sentence
        if self._ready:
            summary.trained, summary.replaced = self._parts.groups.trained, dict(self._parts.groups.replaced)
            summary.replaced_rollouts = self._parts.groups.replaced_rollouts
        self._recorder.note(sentence)

    async def _close(self) -> None:
        """Ends everything in any state. A failure in here is noted and hides no earlier error."""
        self._stopping.close()
        # After SIGTERM, SIGKILL follows at the end of the grace, so no shutdown may take longer.
        limit = min(self._config.deadlines.shutdown, self._stopping.seconds_until(1.0))
        if self._ready:
            try:
                ending = self._parts.elastic.close()
                await deadlines.within(limit, ending, "The end of switches and resizes", "shutdown")
            except protocols.LibraError as error:
                self._recorder.note(f"Not everything ended cleanly: {error}")
        await self._ending.cancel_background(limit)
        await self._workers.shut_down(max(1.0, self._stopping.seconds_until(1.0)))
        # No process writes it any more.
        self._remove_snapshot()

    def _remove_snapshot(self) -> None:
        """Removes the snapshot of a hand-over, unless the workdir belongs to a later run."""
        if self._fencing is None or self._fencing.may_write():
            shutil.rmtree(self._workdir / handover.FOLDER, ignore_errors=True)
