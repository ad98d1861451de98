"""Converts text to tokens and back. The chat template is applied to increments only.

`CharacterTokenizer` ships with the package and needs no file. `load` wraps a Hugging Face tokenizer directory. Neither
converts model output to text and back to tokens. The tokens that the policy sampled are kept, and the template only
adds the text between two outputs.
"""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Sequence

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import hugging_face
from libra_jax.chat import messages as message_forms
from libra_jax.utils import checksums

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

    Printable ASCII and newline keep their ASCII codes, and special tokens have codes below 10. Every other character
    becomes one unknown token, shown as U+FFFD like tokens outside the vocabulary. Of the special tokens, only the
    tool-call marks are recognised in text, so content cannot forge a role or end a turn.

    The template writes each message as a role token, the content and `<|im_end|>`. Calls and reasoning are part of the
    content. The generation prompt is the assistant's role token.
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
        tokens: list[int] = []
        for piece in _CALL_MARKS.split(text):
            if piece in ("<tool_call>", "</tool_call>"):
                tokens.append(_SPECIAL[piece])
            else:
                tokens.extend(ord(letter) if letter == "\n" or " " <= letter <= "~" else _UNKNOWN for letter in piece)
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        vocabulary = range(self.vocab_size)
        return "".join(self._text[token] if token in vocabulary else "\ufffd" for token in token_ids)

    def render(
        self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool
    ) -> list[int]:  # this template has no text that belongs to the start only
        del first
        tokens: list[int] = []
        for message in messages:
            role = _SPECIAL.get(f"<|{message.role}|>") if message.role not in ("pad", "im_end") else None
            if role is None:
                raise protocols.DataError(
                    f"the character tokenizer has no role {message.role!r}: use system, user, assistant or tool"
                )
            tokens += [role, *self.encode(message_forms.for_character(message)), _SPECIAL["<|im_end|>"]]
        if generation_prompt:
            tokens.append(_SPECIAL["<|assistant|>"])
        return tokens

    def render_output(
        self, before: Sequence[protocols.Message], output: protocols.Message, *, first: bool
    ) -> list[int]:
        del before, first
        return [*self.encode(message_forms.for_character(output)), _SPECIAL["<|im_end|>"]]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Names of files that contain a vocabulary. From a directory without them, `transformers` makes an empty tokenizer."""


def listed_ends(model_path: str) -> list[int]:
    """Returns the stop tokens in a model's generation_config.json, or else in its config.json, as transformers does."""
    for file in (pathlib.Path(model_path) / name for name in ("generation_config.json", "config.json")):
        try:
            values = json.loads(file.read_text()) if model_path and file.is_file() else {}
            # Models of several kinds of input keep it with the part that writes text.
            places = (values, values.get("text_config") or {})
            listed = [place["eos_token_id"] for place in places if place.get("eos_token_id") is not None]
        except (OSError, ValueError, AttributeError) as error:
            raise protocols.DataError(f"{file}: cannot be read ({error})") from error
        if listed:
            ends = listed[0] if isinstance(listed[0], list) else listed[:1]
            if not all(type(end) is int for end in ends):  # True is no token
                raise protocols.DataError(f"{file}: eos_token_id is {listed[0]!r:.80}; it must be tokens' ids")
            return ends
    return []


def load(
    path: str, *, incremental: bool = True, model_path: str = "", parse_texts: bool = False
) -> hugging_face.HuggingFaceTokenizer:
    """Loads a Hugging Face tokenizer directory, from local files only.

    Args:
      path: The directory.
      incremental: Whether the template has to be incremental, as the native loop needs it.
      model_path: Directory of the model, which lists further stop tokens. Empty means `path`.
      parse_texts: Whether control tokens that the texts of messages spell are control tokens.

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
    loaded = hugging_face.HuggingFaceTokenizer(
        tokenizer, path, listed_ends(model_path or path), parse_texts=parse_texts
    )
    if incremental:
        loaded.check_incremental()
    return loaded


def create(task: config_lib.TaskConfig, model_path: str, *, incremental: bool = True) -> protocols.Tokenizer:
    """Returns the tokenizer that `task.tokenizer` names: "character", a directory, or (if empty) the model's own.

    Raises ConfigError if the name is neither, and DataError as `load`. A `ChatFormat` needs no incremental template.
    """
    if task.tokenizer == "character":
        return CharacterTokenizer()
    config_lib.check(
        bool(task.tokenizer or model_path),
        "task.tokenizer",
        'is empty and so is model.path; use "character" or a Hugging Face directory',
    )
    if task.tokenizer and not pathlib.Path(task.tokenizer).is_dir():
        near = difflib.get_close_matches(task.tokenizer, ("character",), n=1)
        hint = "; did you mean 'character'?" if near else ""
        config_lib.check(False, "task.tokenizer", f'{task.tokenizer!r} is neither "character" nor a directory{hint}')
    parse = task.control_tokens == "parse"
    return load(task.tokenizer or model_path, incremental=incremental, model_path=model_path, parse_texts=parse)


def demonstration_trajectory(
    task: protocols.Task, demonstrator: protocols.Demonstrator, tokenizer: protocols.Tokenizer
) -> protocols.Trajectory:
    """Returns the tokens of a solved dialogue (`dialogue_trajectory`), rendered exactly as the live loop renders them.

    Raises EnvironmentCrashed if the dialogue does not begin with a prompt and end with an answer of the assistant.
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

    Messages after the last one of the assistant are left out. Raises DataError if the dialogue begins with the
    assistant or has no message of it, or if the template refuses a message.
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
        output = tuple(tokenizer.render_output(pending, message, first=first))
        pending = []
        # No policy sampled these tokens, so they have neither a version nor log-probabilities.
        unsampled = (protocols.NO_VERSION,) * len(output)
        trajectory.append_sampled(protocols.TokenDelta(output, (0.0,) * len(output), unsampled, "stop"))
        trajectory.turns.append(protocols.Turn(generated_tokens=len(output)))
    trajectory.reward, trajectory.finish = 1.0, "demonstration"
    return trajectory
