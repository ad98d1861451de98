"""Stops a run from outside: for a person, who can wait for a training step, or for a scheduler, which cannot.

A scheduler that takes a machine back (a time limit, a pre-emption, a drained node) sends SIGTERM, and SIGKILL some
seconds later: Slurm's `--signal=TERM@SECONDS`, Kubernetes's `terminationGracePeriodSeconds`. Within these seconds
(`config.deadlines.grace`) the run has to write a checkpoint and end. A closed terminal sends SIGHUP, which has the same
meaning. The constants are shares of the grace:

    from the signal on     the run waits for the step under way
    STEP                   the step is aborted between two micro-batches; its groups return to the waiting ones
    ANSWER                 a trainer that has not answered is abandoned: the checkpoint before this one counts
    SAVE                   a checkpoint that is not durable yet is abandoned; the one before it counts
    the rest               workers end

At any of these points, no group is lost and none is trained twice: the newest manifest decides.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from libra_jax import protocols
from libra_jax.coordinator import failure, signals

STEP, ANSWER, SAVE = 0.5, 0.7, 0.85


class Stopping:
    """Stops a run on request. Create it inside the event loop that it serves.

    Args:
      grace: seconds from SIGTERM to the end (`deadlines.grace`).
      ending: the run's end.
      recorder: gets a note for each stop.
      give_up_step: asks the trainer to abort the step under way; called only during a step.

    Attributes:
      terminated: True if a scheduler stopped the run.
      in_step: True during a training step; set by the run.
    """

    def __init__(
        self,
        grace: float,
        *,
        ending: failure.Ending,
        recorder: protocols.Recorder,
        give_up_step: Callable[[], Coroutine[Any, Any, Any]],
    ) -> None:
        self._grace = grace
        self._ending = ending
        self._recorder = recorder
        self._give_up_step = give_up_step
        self._loop = asyncio.get_running_loop()
        self._began = math.inf
        self._timers: list[asyncio.TimerHandle] = []
        self.terminated = False
        self.in_step = False

    def by_signal(self, number: signal.Signals, late: float) -> None:
        """Handles a signal, `late` seconds after it arrived. Later signals of `signals.ENDS` have no further effect."""
        if number in signals.ENDS:
            self.terminate(late, number)
        else:
            self.request()

    def request(self) -> None:
        """Stops the run after the training step under way, with a checkpoint."""
        self._recorder.note("Stopping after the training step under way; a second Ctrl-C ends at once.")
        self._ending.call(failure.Stopped())

    def terminate(self, late: float = 0.0, number: signal.Signals = signal.SIGTERM) -> None:
        """Stops the run within the rest of the grace, of which `late` seconds have passed."""
        if self.terminated:
            return
        # The grace counts from the signal's arrival, not from its handling.
        self.terminated, self._began = True, self._loop.time() - late
        self._timers = [
            self._loop.call_at(self._began + STEP * self._grace, self._end_step),
            self._loop.call_at(self._began + ANSWER * self._grace, self._ending.hurry),
        ]
        within = f"within config.deadlines.grace = {self._grace:g} s"
        self._recorder.note(f"{number.name}: stopping, with a checkpoint, {within}.")
        self._ending.call(failure.Stopped())

    def seconds_until(self, share: float) -> float:
        """Returns the seconds until a share of the grace has passed, at least 0; infinite without SIGTERM."""
        return max(0.0, self._began + share * self._grace - self._loop.time())

    async def unsaved(self, saving: Coroutine[Any, Any, Any]) -> str:
        """Awaits the last checkpoint while a scheduler leaves time for it. Returns why none was written, or "".

        Raises:
          LibraError: the checkpoint failed. During a scheduler's stop, a lost worker is no error, because its node may
            be ending too.
        """
        late = f"did not fit into config.deadlines.grace = {self._grace:g} s"
        if self._ending.hurried:  # the trainer is in its step and does not listen
            saving.close()
            return late
        try:
            await asyncio.wait_for(saving, self.seconds_until(SAVE) if self.terminated else None)
        except TimeoutError:
            return late
        except (protocols.WorkerLost, protocols.DeadlineMissed) as error:
            self.lost(error)
            return "was not taken, because the trainer is lost or does not answer"
        return ""

    def lost(self, error: protocols.LibraError) -> None:
        """Raises the loss of a worker, unless a scheduler is stopping the run anyway."""
        if not self.terminated:
            raise error
        self._recorder.note(f"Lost while the run was being stopped: {error}")

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers:
            timer.cancel()

    def _end_step(self) -> None:
        if self.in_step:
            self._ending.start(self._give_up_step(), "give up the step")
