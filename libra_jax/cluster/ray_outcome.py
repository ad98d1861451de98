"""The outcome of a call in another process, as a value: Ray would wrap a raised error into its own error.

Ray's own error would include the whole traceback.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from libra_jax.protocols import LibraError


class RemoteTraceback(Exception):
    """The traceback of an error in the actor's process, as text. It is the `__cause__` of the error here."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: a value, or a LibraError with its traceback."""

    value: Any = None
    error: LibraError | None = None
    trace: str = ""

    @classmethod
    def of_failure(cls, error: LibraError) -> Outcome:
        """Wraps a LibraError, which the driver raises again."""
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a subclass with its own constructor may not unpickle; its message is enough
            error = LibraError(str(error))
        return cls(error=error, trace=trace)

    def unwrap(self) -> Any:
        """Returns the value, or raises the error if there is one."""
        if self.error is not None:
            raise self.error from RemoteTraceback(f"\n{self.trace}")
        return self.value
