"""A thread that writes `status.json` about once a second, even while the event loop is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path

from libra_jax import user_code
from libra_jax.telemetry import escapes, files, status

BEAT_SECONDS = 1.0

STUCK_SECONDS = 20.0
"""Seconds without an answer of the event loop after which standard error names the line that blocks it."""


class Heartbeat:
    """Watches the event loop in which it is created, until `close`.

    Args:
      workdir: Folder of the run.
      run: State that is written.
      guard: Returns whether this run may still write there.
    """

    def __init__(
        self,
        workdir: Path,
        run: status.RunStatus,
        *,
        guard: files.Guard = files.always,
    ) -> None:
        self._file = workdir / status.STATUS_FILE
        self._run = run
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._beats = 0
        self._warned = False
        self._told_stuck = False
        self._thread_of_loop = threading.get_ident()
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="libra-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the file a last time and ends the thread. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(BEAT_SECONDS)
            # A thread that is still alive hangs on a file server, which must not hold up the run's end.
            if not self._thread.is_alive():
                self._write()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                # A blocked loop does not run this, so that its silence grows in the view.
                self._loop.call_soon_threadsafe(self._run.answered)
            self._write()
            self._look_for_stuck_loop()

    def _look_for_stuck_loop(self) -> None:
        """Names the line of a user's code that blocks the event loop, once per blockage.

        This thread does it, because the blocked loop cannot.
        """
        seconds = self._run.view()["loop_silent_seconds"]
        if seconds < STUCK_SECONDS:
            self._told_stuck = False
        elif not self._told_stuck:
            self._told_stuck = True
            place = user_code.running(sys._current_frames().get(self._thread_of_loop))
            if place:
                print(
                    f"warning: {escapes.visible(place)}, has kept the event loop for {seconds:.0f} s, and nothing else "
                    "of the run goes on meanwhile; call what blocks by asyncio.to_thread.",
                    file=sys.stderr,
                    flush=True,
                )

    def _write(self) -> None:
        if not self._guard():
            return
        self._beats += 1
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_bytes(files.json_line({**self._run.view(), "beat": self._beats}))
            # Replaced in one step: a reader sees the old content or the new one, never a part.
            partial.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                os.utime(self._file)  # this needs no room on the disk, and shows watchers that the run is alive
            self._say(f"{self._file.name} cannot be written ({error.strerror or error}); the run goes on without it.")

    def _say(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._run.warn, f"warning: {sentence}")
