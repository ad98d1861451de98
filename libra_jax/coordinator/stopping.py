"""How a run is stopped from outside: by a person, who can wait for a training step, or by a scheduler, which does not.

A scheduler that takes a machine back (a time limit, a pre-emption, a node that is drained) sends SIGTERM, and SIGKILL
some seconds later: Slurm's `--signal=TERM@SECONDS`, Kubernetes's `terminationGracePeriodSeconds`. Within these seconds
(`config.deadlines.grace`) the run has to write a checkpoint and end. A terminal that is closed sends SIGHUP, which
means the same:

    from the signal on     the step under way is waited for
    STEP of the seconds    it is given up between two micro-batches; its groups go back to those that wait
    ANSWER                 a trainer that has not answered is left behind: the checkpoint before this one counts
    SAVE                   a checkpoint that is not durable yet is left behind, likewise
    the rest               workers end

Whatever of it comes to pass, no group is lost and none is trained twice: what counts is the newest manifest.
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
    """Made inside the event loop it serves.

    Args:
      grace: seconds from SIGTERM to the end (`deadlines.grace`).
      ending: the run's.
      recorder: told of it.
      give_up_step: asks the trainer to give up the step under way; not called where there is none.

    Attributes:
      terminated: a scheduler stopped the run.
      in_step: a training step is under way; the run says so.
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
        """What a signal does, `late` seconds after it came; any further one of `signals.ENDS` does nothing more."""
        if number in signals.ENDS:
            self.terminate(late, number)
        else:
            self.request()

    def request(self) -> None:
        """Stops the run after the training step under way, with a checkpoint."""
        self._recorder.note("Stopping after the training step under way; a second Ctrl-C ends at once.")
        self._ending.call(failure.Stopped())

    def terminate(self, late: float = 0.0, number: signal.Signals = signal.SIGTERM) -> None:
        """Stops the run within what is left of the time of grace, `late` seconds of which have passed."""
        if self.terminated:
            return
        self.terminated, self._began = True, self._loop.time() - late
        self._timers = [
            self._loop.call_at(self._began + STEP * self._grace, self._end_step),
            self._loop.call_at(self._began + ANSWER * self._grace, self._ending.hurry),
        ]
        within = f"within config.deadlines.grace = {self._grace:g} s"
        self._recorder.note(f"{number.name}: stopping, with a checkpoint, {within}.")
        self._ending.call(failure.Stopped())

    def seconds_until(self, share: float) -> float:
        """Seconds that are left until a share of the grace has passed, not below 0; infinite without SIGTERM."""
        return max(0.0, self._began + share * self._grace - self._loop.time())

    async def unsaved(self, saving: Coroutine[Any, Any, Any]) -> str:
        """Awaits the last checkpoint, as long as a scheduler leaves time for it; returns why there is none, if so.

        Raises:
          LibraError: it failed. What a scheduler ends may be ending already, so a worker that is lost is no error then.
        """
        late = f"did not fit into config.deadlines.grace = {self._grace:g} s"
        if self._ending.hurried:  # the trainer is in its step, and does not hear
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
        """A worker is lost, and not brought back: raises that, unless a scheduler is stopping the run anyway."""
        if not self.terminated:
            raise error
        self._recorder.note(f"Lost while the run was being stopped: {error}")

    def close(self) -> None:
        """Nothing is waited for any more."""
        for timer in self._timers:
            timer.cancel()

    def _end_step(self) -> None:
        if self.in_step:
            self._ending.start(self._give_up_step(), "give up the step")
