"""Hugging Face tokenizers, whose chat templates are applied to increments only."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from libra_jax import protocols
from libra_jax.chat import control_tokens, thoughts
from libra_jax.chat import messages as message_forms

_Dialogue = Sequence[Mapping[str, Any]]


def _dicts(*messages: tuple[str, str]) -> _Dialogue:
    return [{"role": role, "content": content} for role, content in messages]


# Texts that no chat template contains by itself.
_SENTINEL, _NEXT = "LIBRA-7f3a-OUTPUT", "LIBRA-7f3a-NEXT"
_PREFIX = _dicts(("user", "LIBRA-7f3a-QUESTION"), ("assistant", _SENTINEL))
_LONGER_PREFIX = (
    *_dicts(("system", "Be brief."), ("user", "first"), ("assistant", "<think>\nhm\n</think>\n\nan earlier turn")),
    *_PREFIX,
)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer whose chat template is applied to increments only.

    An increment's text is what the template writes after a fixed assistant turn and its end-of-turn token. So it
    contains the template's own text between turns (such as a newline), and does not depend on the content of earlier
    turns.

    A template that is not incremental renders whole dialogues only (`dialogue`). An increment under such a template is
    refused.

    Attributes:
      hugging_face: The wrapped tokenizer.
    """

    def __init__(self, tokenizer: Any, name: str, ends: Sequence[int] = (), *, parse_texts: bool = False) -> None:
        """Wraps a `transformers` tokenizer.

        Args:
          tokenizer: The tokenizer.
          name: Its name in errors.
          ends: Further stop tokens, which the model's files list.
          parse_texts: Whether control tokens that the texts of messages spell are control tokens.

        Raises:
          DataError: There is no chat template, or it does not end an assistant turn with a special token.
        """
        self.hugging_face = tokenizer
        # `decode` first looks for arrays in the list, which costs as much as the decoding of a stream's few tokens.
        self._decode = getattr(tokenizer, "_decode", tokenizer.decode)
        self._name = name
        if not getattr(tokenizer, "chat_template", None):
            raise protocols.DataError(
                f"{name}: the tokenizer has no chat template; use an instruction-tuned model's directory or add one"
            )
        self._parts = False
        self._parts = self._wants_parts()
        after = self._after_output([*_PREFIX, *_dicts(("user", "next"))], True)
        tokens = tokenizer.encode(after, add_special_tokens=False)
        if not tokens or tokens[0] not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
            raise protocols.DataError(
                f"{name}: the chat template does not end an assistant turn with a special token "
                f"(it goes on with {after[:20]!r}), so a turn cannot end on a stop token id"
            )
        self._turn_end = str(tokenizer.convert_ids_to_tokens(tokens[0]))
        self._refusal = self._not_incremental()
        # Some models end their last turn with the token that ends a text, or a call with another one.
        eos_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([tokens[0], *eos_ids, *ends]))
        self.pad_token_id: int = tokens[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.vocab_size: int = len(tokenizer)
        self._added = control_tokens.any_of(tokenizer.get_added_vocab())
        self._controls = None if parse_texts else self._control_tokens()

    def _wants_parts(self) -> bool:
        """Returns whether the template takes content as a list of parts only, as some multi-modal templates do."""
        for parts in (False, True):
            with contextlib.suppress(protocols.DataError):
                text = self._apply(_in_parts(_PREFIX) if parts else _PREFIX, True)
                if all(message["content"] in text for message in _PREFIX):
                    return parts
        return False

    def _control_tokens(self) -> control_tokens.ControlTokens:
        """Returns the control tokens, as the tokenizer calls them or as the template uses them."""

        def framing(role: str) -> Collection[str]:
            with contextlib.suppress(protocols.DataError):
                return set(self._added.findall(self._increment(_PREFIX, _dicts((role, _NEXT)), False)))
            return set()

        # An end beyond the vocabulary has no text.
        ends = {text for text in self.hugging_face.convert_ids_to_tokens([*self.stop_token_ids]) if text is not None}
        turns = {*ends, *framing("user"), *framing("system"), *self._added.findall(self.header)[:1]}
        in_outputs = set(self._added.findall(self.template)) - turns
        return control_tokens.ControlTokens(self.hugging_face, turns, framing("tool"), in_outputs)

    def _not_incremental(self) -> str:
        """Returns why the template cannot be applied to increments; empty if it can.

        A user message has to be rendered the same after two different dialogues, and with its content.
        """
        increment = _dicts(("user", _NEXT))
        longer: _Dialogue = _LONGER_PREFIX
        try:
            self._apply(longer[:2], True)
        except protocols.DataError:  # some templates refuse a system message
            longer = longer[1:]
        try:
            alone, later = self._increment(_PREFIX, increment, True), self._increment(longer, increment, True)
        except protocols.DataError as error:
            return str(error)
        if alone == later and _NEXT in alone:
            return ""
        return (
            f"{self._name}: the chat template is not incremental: the same user message is rendered as {alone!r} "
            f"after one dialogue and as {later!r} after another, so it cannot be trained on token by token"
        )

    @property
    def incremental(self) -> bool:
        """Whether the template can be applied to increments."""
        return not self._refusal

    def check_incremental(self) -> None:
        """Raises DataError, which shows what differs, if the template cannot be applied to increments."""
        if self._refusal:
            raise protocols.DataError(self._refusal)

    def dialogue(self, messages: Sequence[protocols.Message], tools: Sequence[protocols.ToolSpec] = ()) -> str:
        """Returns the text of a whole dialogue, up to the header after which the assistant writes."""
        offered: Sequence[Mapping[str, Any]] = [message_forms.tool_for_template(tool) for tool in tools]
        if self._controls is not None:
            offered = self._controls.cut(offered)
        return self._apply(self._cut(messages), True, offered)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text that a template has written, with nothing added."""
        if self._controls is not None and control_tokens.CUT in text:
            return self._controls.encode(text)
        return list(self.hugging_face.encode(control_tokens.readable(text), add_special_tokens=False))

    def encode_after_turn(self, text: str) -> list[int]:
        """Returns the tokens of a template's text that follows the end of a turn."""
        # SentencePiece's tokenizers may put a space in front of a text, but in front of none after a control token.
        return self.encode(self._turn_end + text)[1:]

    def _encode_after(self, header: str, text: str) -> list[int]:
        """Returns the tokens of the text that follows a header whose tokens stay as they are."""
        # No token before the last control token changes one after it.
        header = header[max((token.start() for token in self._added.finditer(header)), default=0) :]
        before = self.encode(header)
        if (tokens := self.encode(header + text))[: len(before)] == before:
            return tokens[len(before) :]
        # A token would span both. Any text before this one will do that keeps a space out of its beginning.
        target_text = self.decode(before) + control_tokens.joined(text)
        for prefix in ("", "\n", ".", "0", "a"):
            head, tokens = self.encode(prefix), self.encode(prefix + text)
            tail = tokens[len(head) :]
            if tokens[: len(head)] == head and self.decode([*before, *tail]) == target_text:
                return tail
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens spelled out."""
        # Clean-up would move spaces, and the text would no longer be that of these tokens.
        return str(self._decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def template(self) -> str:
        """Source of the chat template for dialogues with tools."""
        try:
            return str(self.hugging_face.get_chat_template(tools=[{}]))
        except Exception:  # several templates, and none that is named as the one to use
            return ""

    @property
    def header(self) -> str:
        """Text with which the template begins an output."""
        return self._apply(_PREFIX[:1], True).removeprefix(self._apply(_PREFIX[:1], False))

    def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> list[int]:
        increment = self._cut(messages)
        # Only here the template may write what belongs to the start of a text.
        if first:
            return self.encode(self._apply(increment, generation_prompt))
        self.check_incremental()
        return self.encode_after_turn(self._increment(_PREFIX, increment, generation_prompt))

    def render_output(
        self, before: Sequence[protocols.Message], output: protocols.Message, *, first: bool
    ) -> list[int]:
        """Returns the tokens of a message as the policy writes it after `before`, its stop token included.

        White space around the content is the template's own. Other text that the template puts there, such as an empty
        thought, is left out: a demonstration shows what its author wrote. If the template opens a thought, the content
        closes it, because an answer in a thought is none.
        """
        before_forms, output_forms = self._cut(before), self._cut([output])

        def text(increment: _Dialogue, generation_prompt: bool) -> str:
            if first:
                return self._apply(increment, generation_prompt)
            return self._turn_end + self._increment(_PREFIX, increment, generation_prompt)

        header, full_text = text(before_forms, True), text([*before_forms, *output_forms], False)
        output_text, end, _ = full_text[len(header) :].partition(self._turn_end)
        follows, content = bool(end) and full_text.startswith(header), str(output_forms[0]["content"])
        if output.tool_calls or output.reasoning:
            parts = (output.content, output.reasoning, *(call.name for call in output.tool_calls))
            if not follows or not all(part.strip() in control_tokens.joined(output_text) for part in parts):
                raise protocols.DataError(
                    f"{self._name}: the chat template drops the calls, the reasoning or the content of an assistant's "
                    "message; write them in its content, as the model does"
                )
        elif not follows or output_text.strip() != content.strip():
            output_text = content
        opening = thoughts.opening(header)
        if opening and not thoughts.split(opening + control_tokens.joined(output_text)).answer.strip():
            output_text = f"\n{thoughts.MARKS[opening.rstrip()]}\n\n{output_text}"
        return self._encode_after(header, output_text + self._turn_end)

    def _cut(self, messages: Sequence[protocols.Message]) -> _Dialogue:
        """Returns messages in the template's form, which spell no control token."""
        forms = map(message_forms.for_template, messages)
        return [form if self._controls is None else self._controls.cut(form, form["role"]) for form in forms]

    def _apply(self, messages: _Dialogue, generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        def rendered(messages: _Dialogue) -> str:
            return str(
                self.hugging_face.apply_chat_template(
                    _in_parts(messages) if self._parts else list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )

        try:
            return rendered(messages)
        except Exception as error:  # jinja lets templates raise errors of any type
            with contextlib.suppress(Exception):
                if (named := message_forms.named(messages)) != messages:
                    return rendered(named)
            roles = ", ".join(str(message["role"]) for message in messages)
            raise protocols.DataError(
                f"{self._name}: the chat template refuses a dialogue with the roles {roles} ({error})"
            ) from error

    def _after_output(self, messages: _Dialogue, generation_prompt: bool) -> str:
        """Returns what the template writes after the assistant turn of `_PREFIX`."""
        _, sentinel, after = self._apply(messages, generation_prompt).partition(_SENTINEL)
        if not sentinel:
            raise protocols.DataError(f"{self._name}: the chat template drops the content of assistant turns")
        return after

    def _increment(self, prefix: _Dialogue, increment: _Dialogue, generation_prompt: bool) -> str:
        after = self._after_output([*prefix, *increment], generation_prompt)
        if not after.startswith(self._turn_end):
            raise protocols.DataError(
                f"{self._name}: the chat template is not incremental: what follows an assistant turn begins with "
                f"{after[:20]!r} here and with {self._turn_end!r} elsewhere"
            )
        return after[len(self._turn_end) :]


def _in_parts(messages: _Dialogue) -> _Dialogue:
    """Returns messages with their content as vLLM gives it to templates that go through parts of it."""
    return [
        message
        if message["role"] == "tool"
        else {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else []}
        for message in messages
    ]
