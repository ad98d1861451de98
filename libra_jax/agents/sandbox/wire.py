"""Frames between the host and a sandbox's first process: a JSON head and a body of plain bytes, both of bounded size.

Code in the sandbox may send anything. An invalid reply raises `Malformed`, and its sandbox is ended.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, cast

from libra_jax import protocols
from libra_jax.agents.sandbox import supervisor


class Malformed(Exception):
    """The sandbox sent an invalid reply."""


@dataclass(frozen=True)
class Reply:
    """A sandbox's reply to one call.

    Attributes:
      status: The call's status, as the sandbox saw it.
      lost: Part of the sandbox's state that was lost: "", "state" or "all".
      note: What happened to the call, in a few words. Empty if nothing special happened.
      left_out: Bytes of output that were dropped between `head` and `tail`.
      head: The output's beginning, or all of it.
      tail: The output's end.
    """

    status: protocols.ToolStatus
    lost: str
    note: str
    left_out: int
    head: bytes
    tail: bytes

    def text(self) -> str:
        """Returns the output as the policy reads it."""
        if not self.left_out:
            return (self.head + self.tail).decode(errors="replace")
        mark = f"\n[... {self.left_out} bytes left out ...]\n"
        return self.head.decode(errors="replace") + mark + self.tail.decode(errors="replace")


async def receive(stream: asyncio.StreamReader, most_bytes: int) -> Reply:
    """Reads the next reply.

    Args:
      stream: Stream from the sandbox.
      most_bytes: Largest accepted body in bytes.

    Raises:
      Malformed: The reply is too long, or is not a valid reply.
      EOFError: The sandbox ended.
    """
    head_bytes, body_bytes = supervisor.HEADER.unpack(await stream.readexactly(supervisor.HEADER.size))
    # Checked before reading: a header must not make the host allocate memory without a bound.
    if head_bytes > supervisor.HEAD_BYTES or body_bytes > most_bytes:
        raise Malformed(f"a reply of {head_bytes} and {body_bytes} bytes")
    head = await stream.readexactly(head_bytes)
    body = await stream.readexactly(body_bytes)
    return _read(head, body)


def _read(head: bytes, body: bytes) -> Reply:
    try:
        values: Any = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise Malformed("a head that is no JSON") from error
    if not isinstance(values, dict):
        raise Malformed("a head that is no JSON object")
    status, lost, note = (values.get(name) for name in ("status", "lost", "note"))
    split, left_out = values.get("split"), values.get("left_out")
    # `type(...) is`: True and False are ints to isinstance, and the sender is untrusted.
    if status not in ("success", "failure", "timeout") or lost not in ("", "state", "all") or type(note) is not str:
        raise Malformed("a head without status, losses or note")
    if type(split) is not int or type(left_out) is not int or not (0 <= split <= len(body) and 0 <= left_out < 2**63):
        raise Malformed("a head whose counts are none")
    return Reply(cast("protocols.ToolStatus", status), cast(str, lost), note, left_out, body[:split], body[split:])
