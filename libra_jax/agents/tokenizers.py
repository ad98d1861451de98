"""Converts text to tokens and back. The chat template is applied to increments only.

`CharacterTokenizer` ships with the package and needs no file. `load` wraps a Hugging Face tokenizer directory. Neither
converts model output to text and back to tokens. The tokens that the policy sampled are kept, and the template only
adds the text between two outputs.
"""

from __future__ import annotations

import contextlib
import difflib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from libra_jax import checksums, config, protocols

_SPECIAL = {
    "<|pad|>": 0,
    "<|im_end|>": 1,
    "<|system|>": 2,
    "<|user|>": 3,
    "<|assistant|>": 4,
    "<|tool|>": 5,
    "<tool_call>": 6,
    "</tool_call>": 7,
}
_UNKNOWN = 127
_CALL_MARKS = re.compile(r"(</?tool_call>)")


class CharacterTokenizer:
    """A tokenizer with one token per character.

    Printable ASCII and newline keep their ASCII codes, and special tokens have codes below 10.

    The template writes each message as a role token, the content and `<|im_end|>`. The generation prompt is the
    assistant's role token. Every other character becomes one unknown token, shown as U+FFFD. Of the special tokens,
    only the tool-call marks are recognised in text, so content cannot forge a role or end a turn.
    """

    vocab_size = 128
    stop_token_ids: tuple[int, ...] = (_SPECIAL["<|im_end|>"],)
    pad_token_id = _SPECIAL["<|pad|>"]

    def __init__(self) -> None:
        self._text = ["\ufffd"] * self.vocab_size
        for code in (10, *range(32, 127)):
            self._text[code] = chr(code)
        for text, code in _SPECIAL.items():
            self._text[code] = text

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of plain text. `<tool_call>` and `</tool_call>` are one token each."""
        tokens: list[int] = []
        for piece in _CALL_MARKS.split(text):
            if piece in ("<tool_call>", "</tool_call>"):
                tokens.append(_SPECIAL[piece])
            else:
                tokens.extend(ord(letter) if letter == "\n" or " " <= letter <= "~" else _UNKNOWN for letter in piece)
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens spelled out. Tokens outside the vocabulary become U+FFFD."""
        known = range(self.vocab_size)
        return "".join(self._text[token] if token in known else "\ufffd" for token in token_ids)

    def render(
        self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool
    ) -> list[int]:  # this template has no text that belongs to the start only
        """Returns the tokens that `messages` add to the context: a role token, the content and a stop token for each.

        Raises:
          DataError: The template does not know a role.
        """
        del first
        tokens: list[int] = []
        for message in messages:
            role = _SPECIAL.get(f"<|{message.role}|>") if message.role not in ("pad", "im_end") else None
            if role is None:
                raise protocols.DataError(
                    f"the character tokenizer has no role {message.role!r}: use system, user, assistant or tool"
                )
            tokens += [role, *self.encode(message.content), _SPECIAL["<|im_end|>"]]
        if generation_prompt:
            tokens.append(_SPECIAL["<|assistant|>"])
        return tokens


# Texts that no chat template contains by itself.
_SENTINEL = "LIBRA-7f3a-OUTPUT"
_PREFIX = (("user", "LIBRA-7f3a-QUESTION"), ("assistant", _SENTINEL))
_LONGER_PREFIX = (
    ("system", "Be brief."),
    ("user", "first"),
    ("assistant", "<think>\nhm\n</think>\n\nan earlier turn"),
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

    def __init__(self, tokenizer: Any, name: str) -> None:
        """Wraps a `transformers` tokenizer. `name` is its name in errors.

        Raises:
          DataError: There is no chat template, or it does not end an assistant turn with a special token.
        """
        self.hugging_face = tokenizer
        self._name = name
        if not getattr(tokenizer, "chat_template", None):
            raise protocols.DataError(
                f"{name}: the tokenizer has no chat template; use an instruction-tuned model's directory or add one"
            )
        self._parts = False
        self._parts = self._wants_parts()
        after = self._after_output((*_PREFIX, ("user", "next")), True)
        tokens = tokenizer.encode(after, add_special_tokens=False)
        if not tokens or tokens[0] not in {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}:
            raise protocols.DataError(
                f"{name}: the chat template does not end an assistant turn with a special token "
                f"(it goes on with {after[:20]!r}), so a turn cannot end on a stop token id"
            )
        self._turn_end = str(tokenizer.convert_ids_to_tokens(tokens[0]))
        self._refusal = self._not_incremental()
        end_id = tokenizer.convert_tokens_to_ids(self._turn_end)
        eos_id = tokenizer.eos_token_id
        # Some models end their last turn with the token that ends a text.
        self.stop_token_ids: tuple[int, ...] = (end_id,) if eos_id in (None, end_id) else (end_id, eos_id)
        self.pad_token_id: int = end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.vocab_size: int = len(tokenizer)

    def _wants_parts(self) -> bool:
        """Returns whether the template takes content as a list of parts only, as some multi-modal templates do."""
        dialogue = _dicts(_PREFIX)
        for parts in (False, True):
            with contextlib.suppress(protocols.DataError):
                text = self._apply(_in_parts(dialogue) if parts else dialogue, True)
                if all(content in text for _, content in _PREFIX):
                    return parts
        return False

    def _not_incremental(self) -> str:
        """Returns why the template cannot be applied to increments; empty if it can.

        A user message has to be rendered the same after two different dialogues, and with its content.
        """
        increment = (("user", "LIBRA-7f3a-NEXT"),)
        longer: Sequence[tuple[str, str]] = _LONGER_PREFIX
        try:
            self._apply(_dicts(longer[:2]), True)
        except protocols.DataError:  # some templates refuse a system message
            longer = longer[1:]
        try:
            alone, later = self._increment(_PREFIX, increment, True), self._increment(longer, increment, True)
        except protocols.DataError as error:
            return str(error)
        if alone == later and "LIBRA-7f3a-NEXT" in alone:
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
        """Checks that the template can be applied to increments.

        Raises:
          DataError: It cannot; the message shows what differs.
        """
        if self._refusal:
            raise protocols.DataError(self._refusal)

    def dialogue(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Returns the text of a whole dialogue.

        Args:
          messages: Messages in the form that chat templates take.
          tools: Tools in the form that chat templates take.
          generation_prompt: Whether the header after which the assistant writes ends the text.

        Raises:
          DataError: The template refuses the dialogue.
        """
        return self._apply(messages, generation_prompt, tools)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of text, with nothing added."""
        return list(self.hugging_face.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens spelled out."""
        # Clean-up would move spaces, and the text would no longer be that of these tokens.
        return str(
            self.hugging_face.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

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
        question = _dicts(_PREFIX[:1])
        return self._apply(question, True).removeprefix(self._apply(question, False))

    def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> list[int]:
        """Returns the tokens that `messages` add to the context.

        If not `first`, they follow a model output and its stop token.

        Raises:
          DataError: The template refuses these messages, or is not incremental and the messages are not the first.
        """
        increment = tuple((message.role, message.content) for message in messages)
        # Only here the template may write what belongs to the start of a text.
        if first:
            return self.encode(self._apply(_dicts(increment), generation_prompt))
        self.check_incremental()
        return self.encode(self._increment(_PREFIX, increment, generation_prompt))

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        try:
            return str(
                self.hugging_face.apply_chat_template(
                    _in_parts(messages) if self._parts else list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )
        except Exception as error:  # jinja lets templates raise errors of any type
            roles = ", ".join(str(message["role"]) for message in messages)
            raise protocols.DataError(
                f"{self._name}: the chat template refuses a dialogue with the roles {roles} ({error})"
            ) from error

    def _after_output(self, messages: Sequence[tuple[str, str]], generation_prompt: bool) -> str:
        """Returns what the template writes after the assistant turn of `_PREFIX`."""
        _, found, after = self._apply(_dicts(messages), generation_prompt).partition(_SENTINEL)
        if not found:
            raise protocols.DataError(f"{self._name}: the chat template drops the content of assistant turns")
        return after

    def _increment(
        self, prefix: Sequence[tuple[str, str]], increment: Sequence[tuple[str, str]], generation_prompt: bool
    ) -> str:
        after = self._after_output((*prefix, *increment), generation_prompt)
        if not after.startswith(self._turn_end):
            raise protocols.DataError(
                f"{self._name}: the chat template is not incremental: what follows an assistant turn begins with "
                f"{after[:20]!r} here and with {self._turn_end!r} elsewhere"
            )
        return after[len(self._turn_end) :]


def _dicts(messages: Sequence[tuple[str, str]]) -> list[Mapping[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


def _in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns messages with their content as vLLM gives it to templates that go through parts of it."""
    return [
        message
        if message["role"] == "tool"
        else {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else []}
        for message in messages
    ]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Names of files that contain a vocabulary. From a directory without them, `transformers` makes an empty tokenizer."""


def load(path: str, *, incremental: bool = True) -> HuggingFaceTokenizer:
    """Loads a Hugging Face tokenizer directory, from local files only.

    Args:
      path: The directory.
      incremental: Whether the template has to be incremental, as the native loop needs it.

    Raises:
      DataError: The directory is missing, or contains no usable tokenizer or template.
    """
    if not pathlib.Path(path).is_dir():
        raise protocols.DataError(f"{path}: no such tokenizer directory; give one that holds tokenizer.json")
    if not any((pathlib.Path(path) / name).is_file() for name in TOKENIZER_FILES):
        raise protocols.DataError(f"{path}: holds no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}")
    checksums.check_sealed(pathlib.Path(path), weights=False)
    import transformers  # imported here, so that runs with the character tokenizer never pay for it

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # any file of the directory may be missing or malformed, and each fails in its own way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise protocols.DataError(f"{path}: the tokenizer cannot be loaded ({reason})") from error
    loaded = HuggingFaceTokenizer(tokenizer, path)
    if incremental:
        loaded.check_incremental()
    return loaded


def create(task: config.TaskConfig, model_path: str, *, incremental: bool = True) -> protocols.Tokenizer:
    """Returns the tokenizer that `task.tokenizer` names: "character", a directory, or (if empty) the model's own.

    Args:
      task: Settings of the task.
      model_path: Directory of the model, or empty.
      incremental: Whether the template has to be incremental, as the native loop needs it. A `ChatFormat` needs no
        such template.

    Raises:
      ConfigError: The name is neither.
      DataError: The directory cannot be used.
    """
    if task.tokenizer == "character":
        return CharacterTokenizer()
    config.check(
        bool(task.tokenizer or model_path),
        "task.tokenizer",
        'is empty and so is model.path; use "character" or a Hugging Face directory',
    )
    if task.tokenizer and not pathlib.Path(task.tokenizer).is_dir():
        near = difflib.get_close_matches(task.tokenizer, ("character",), n=1)
        hint = "; did you mean 'character'?" if near else ""
        config.check(False, "task.tokenizer", f'{task.tokenizer!r} is neither "character" nor a directory{hint}')
    return load(task.tokenizer or model_path, incremental=incremental)


def demonstration_trajectory(
    task: protocols.Task, demonstrator: protocols.Demonstrator, tokenizer: protocols.Tokenizer
) -> protocols.Trajectory:
    """Returns the tokens of a solved dialogue, rendered exactly as the live loop renders them.

    The loss covers the assistant's tokens, including stop tokens.

    Raises:
      EnvironmentCrashed: The dialogue does not begin with a prompt and end with an answer of the assistant.
    """
    messages = list(demonstrator.demonstration(task))
    if len(messages) < 2 or messages[0].role == "assistant" or messages[-1].role != "assistant":
        raise protocols.EnvironmentCrashed(
            f"task {task.prompt_id}: its demonstration must begin with a prompt and end with the assistant's answer"
        )
    return dialogue_trajectory(f"{task.prompt_id}/demonstration", messages, tokenizer)


def dialogue_trajectory(
    name: str, messages: Sequence[protocols.Message], tokenizer: protocols.Tokenizer
) -> protocols.Trajectory:
    """Returns the tokens of a dialogue. The loss covers the assistant's tokens, including stop tokens.

    Messages after the last one of the assistant are left out.

    Raises:
      DataError: The dialogue begins with the assistant or has no message of it, or the template refuses a message.
    """
    if not messages or messages[0].role == "assistant" or all(item.role != "assistant" for item in messages):
        raise protocols.DataError("a dialogue must begin with a prompt, and have an answer of the assistant")
    trajectory = protocols.Trajectory(name, name.partition("/")[0])
    pending: list[protocols.Message] = []
    for message in messages:
        if message.role != "assistant":
            # All messages between two outputs are rendered as one increment, as the live loop does.
            pending.append(message)
            continue
        first = not trajectory.token_ids
        source = protocols.TokenSource.PROMPT if first else protocols.TokenSource.TOOL
        trajectory.append_text(tokenizer.render(pending, first=first, generation_prompt=True), source)
        pending = []
        output = (*tokenizer.encode(message.content), tokenizer.stop_token_ids[0])
        # No policy sampled these tokens, so they have neither a version nor log-probabilities.
        unsampled = (protocols.NO_VERSION,) * len(output)
        trajectory.append_sampled(protocols.TokenDelta(output, (0.0,) * len(output), unsampled, "stop"))
        trajectory.turns.append(protocols.Turn(generated_tokens=len(output)))
    trajectory.reward, trajectory.finish = 1.0, "demonstration"
    return trajectory
