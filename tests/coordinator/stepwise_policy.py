"""The fake engines' script of a policy that has learned the stepwise calculator."""

from __future__ import annotations

import re
from collections.abc import Sequence

from libra_jax import protocols
from libra_jax.chat import tokenizers

TOKENIZER = tokenizers.CharacterTokenizer()
(ASSISTANT,) = TOKENIZER.render([], first=False, generation_prompt=True)
(STOP,) = TOKENIZER.stop_token_ids


def solve(token_ids: Sequence[int], sampling: protocols.SamplingParams) -> int:
    """The next token: calls the tool with what was shown last, or answers with it if it is a value or an error."""
    del sampling
    start = max(at for at, token in enumerate(token_ids) if token == ASSISTANT) + 1
    shown = TOKENIZER.decode(token_ids[: start - 1]).rpartition("|>")[0].rpartition("<|im_end")[0]
    _, role, text = re.split(r"<\|(user|tool)\|>", shown)[-3:]
    value = re.fullmatch(r"(-?\d+|error).*", text.strip()) if role == "tool" else None
    finished = value is not None and not re.search(r"\d[-+*/]", text)
    output = str(value[1]) if value is not None and finished else f"<tool_call>{text.strip()}</tool_call>"
    return [*TOKENIZER.encode(output), STOP][len(token_ids) - start]
