"""Keeps the texts of messages from spelling control tokens where a Hugging Face template writes both in one text.

A control token in a message's text is cut: a mark that no text holds stands after its first character. So the template
writes it like any other text. Afterwards, control tokens that are not cut are the template's own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from libra_jax import protocols

CUT = "\udfff"
"""Mark in a cut control token. Half a surrogate pair, which no readable text holds."""

_ESCAPE = "\ufdd0"
"""Begins the names of control tokens in the tokenizer for cut texts. Unicode assigns it to no character."""


def readable(text: str) -> str:
    """Returns the text with U+FFFD for each half of a surrogate pair, which no tokenizer can read."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def joined(text: str) -> str:
    """Returns the text without the marks in its cut control tokens."""
    return text.replace(CUT, "")


class ControlTokens:
    """The control tokens of a Hugging Face tokenizer.

    Args:
      hugging_face: The tokenizer.
      framing: Tokens with which the template begins and ends turns, although the tokenizer may not call them special.
      in_tools: Those around a tool's return. Only a tool must not write them.
      in_outputs: Tokens that an assistant's message may hold, such as marks of calls, although the tokenizer calls them
        special.
    """

    def __init__(
        self, hugging_face: Any, framing: Collection[str], in_tools: Collection[str], in_outputs: Collection[str]
    ) -> None:
        self._hugging_face = hugging_face
        special = {*hugging_face.all_special_tokens, *framing}
        special |= {str(token) for token in hugging_face.added_tokens_decoder.values() if token.special}
        self._names = {text: f"{_ESCAPE}{text}{_ESCAPE}" for text in (*special, *in_tools)}
        self._all = any_of(self._names)
        self._by_role = {"tool": self._all, "assistant": any_of(special - set(in_outputs))}
        self._default = any_of(special)

    def cut(self, value: Any, role: str = "") -> Any:
        """Returns a text, or the JSON value of texts, that a message of this role holds, readable and cut."""
        if isinstance(value, str):
            pattern = self._by_role.get(role, self._default)
            return pattern.sub(
                lambda token: f"{token[0][0]}{CUT}{token[0][1:]}", readable(value).replace(_ESCAPE, "\ufffd")
            )
        if isinstance(value, Mapping):
            return {self.cut(key, role): self.cut(item, role) for key, item in value.items()}
        return [self.cut(item, role) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a template's text with cut control tokens in it."""
        try:
            backend, ids = self._escaped
        except Exception as error:  # the many forms of a tokenizer fail in many ways
            raise protocols.DataError(
                "a message spells a control token, and this tokenizer cannot write one as text "
                f"({type(error).__name__}); remove it from the message, or set task.control_tokens=parse"
            ) from error
        # A mark belongs to the token before it, so a token in front of a mark is cut.
        escaped = re.sub(f"(?:{self._all.pattern})(?!{CUT})", lambda token: self._names[token[0]], text)
        tokens = backend.encode(readable(joined(escaped)), add_special_tokens=False).ids
        return [ids.get(token, token) for token in tokens]

    @functools.cached_property
    def _escaped(self) -> tuple[Any, Mapping[int, int]]:
        """A tokenizer that knows the control tokens by their escaped names only, and the right ids of added tokens."""
        import tokenizers

        names, content = self._names, json.loads(self._hugging_face.backend_tokenizer.to_str())
        model, added = content["model"], content["added_tokens"]
        right = {names.get(token["content"], token["content"]): token["id"] for token in added}
        for token in added:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], list):
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        else:
            model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        pairs = [(pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model.get("merges", ())]
        if pairs:
            model["merges"] = [pair for pair, parts in pairs if not {*parts, "".join(parts)} & names.keys()]
        content |= {"truncation": None, "padding": None, "post_processor": None}
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        return backend, {int(backend.token_to_id(text) or 0): number for text, number in right.items()}


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern of these texts, the longest first."""

    def ends_of(ends: Collection[str]) -> str:
        # By common beginnings, because a vocabulary may have thousands of control tokens.
        by_letter: dict[str, list[str]] = {}
        for end in filter(None, ends):
            by_letter.setdefault(end[0], []).append(end[1:])
        branches = "|".join(re.escape(letter) + ends_of(rest) for letter, rest in by_letter.items())
        return f"(?:{branches})" + "?" * ("" in ends) if branches else ""

    return re.compile(ends_of(texts) or r"(?!)")
