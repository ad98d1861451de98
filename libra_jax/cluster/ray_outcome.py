"""What a call in another process came to, as it travels: over Ray, errors are values.

Ray would wrap whatever is raised into an error of its own, traceback and all.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from libra_jax.protocols import LibraError


class RemoteTraceback(Exception):
    """The traceback of an error in the actor's process, as text: the `__cause__` of that error here."""


@dataclass(frozen=True)
class Outcome:
    """What a call came to: a value, or one of our errors with its traceback."""

    value: Any = None
    error: LibraError | None = None
    trace: str = ""

    @classmethod
    def of_failure(cls, error: LibraError) -> Outcome:
        """An error of ours, which the driver raises again."""
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a subclass with a constructor of its own: its sentence is what counts
            error = LibraError(str(error))
        return cls(error=error, trace=trace)

    def unwrap(self) -> Any:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error from RemoteTraceback(f"\n{self.trace}")
        return self.value
