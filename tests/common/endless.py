"""Ends a test that would go on for ever."""

import contextlib
import signal

SECONDS = 20


@contextlib.contextmanager
def broken_off():
    """Raises TimeoutError in the work that is still going on when `SECONDS` have passed."""

    def end(*_):
        raise TimeoutError(f"still at work after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
