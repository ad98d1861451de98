"""Causal states as C-MLFQ keys them: which tool returned, how much, whether it worked (arXiv 2606.03077, section 4).

Payload sizes are put in octave classes, so that a return of 900 tokens and one of 1,000 are the same evidence.
"""

from __future__ import annotations

from libra_jax import protocols

Key = tuple[str, int, str]
"""(tool, payload-size class, status): one edge of a prefix tree."""

SMALLEST_BITS = 6
"""Payloads below 2**6 tokens share the class 0: a number or a short message says the same at any such size."""

LARGEST_CLASS = 12
"""Payloads of 2**17 tokens and more share one class."""


def size_class(payload_tokens: int) -> int:
    """Octave of a payload size in tokens, from 0 to `LARGEST_CLASS`."""
    octave = payload_tokens.bit_length() - SMALLEST_BITS
    return 0 if octave < 0 else LARGEST_CLASS if octave > LARGEST_CLASS else octave


def key(state: protocols.CausalState) -> Key:
    """The state's key in a prefix tree."""
    return state.tool, size_class(state.payload_tokens), state.status
