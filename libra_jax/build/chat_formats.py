"""Makes the tokenizer and the chat format of a run's model: its template, and vLLM's parsers of its outputs."""

from __future__ import annotations

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import chat_format, hugging_face, output_parsers, tokenizers
from libra_jax.rollouts import factories
from libra_jax.tools import toolkit


def policy_tokenizer(config: config_lib.RunConfig, tools: toolkit.Toolkit) -> protocols.Tokenizer:
    """Returns the tokenizer of the run's model.

    The native loop adds increments to a dialogue, so its template has to be incremental. A harness sends whole
    dialogues, and takes any template.
    """
    tokenizer = tokenizers.create(config.task, config.model.path, incremental=False)
    if (
        isinstance(tokenizer, hugging_face.HuggingFaceTokenizer)
        and not tokenizer.incremental
        and not drives(config, tools)
    ):
        tokenizer.check_incremental()
    return tokenizer


def drives(config: config_lib.RunConfig, tools: toolkit.Toolkit) -> bool:
    """Returns whether the run's environment is a harness, whose agent writes dialogues as it likes."""
    # Made to see its kind, and never begun.
    return factories.is_harness(factories.environment_factory(config.task, tools)())


def make(tokenizer: protocols.Tokenizer, settings: config_lib.GatewayConfig) -> protocols.ChatFormat:
    """Returns the chat format of a tokenizer, with the parsers that the settings name.

    Raises ConfigError if vLLM has no parser of a name, or the parser cannot read the tokenizer's tokens.
    """
    if isinstance(tokenizer, tokenizers.CharacterTokenizer):
        # The calculator's calls are expressions between Hermes's marks, and stay in the text.
        parsing = _parsing(tokenizer, settings, chat_format.Parsers())
        return chat_format.CharacterFormat(tokenizer, parsing)
    if isinstance(tokenizer, hugging_face.HuggingFaceTokenizer):
        certain = chat_format.parsers_of(tokenizer.template, tokenizer.header)
        return chat_format.HuggingFaceFormat(tokenizer, _parsing(tokenizer, settings, certain))
    raise protocols.DataError(
        f"a {type(tokenizer).__name__} has no chat format: use the character tokenizer or a Hugging Face directory"
    )


def _parsing(
    tokenizer: protocols.Tokenizer, settings: config_lib.GatewayConfig, certain: chat_format.Parsers
) -> output_parsers.Parsing:
    names = chat_format.Parsers(
        _name(settings.tool_parser, certain.tool), _name(settings.reasoning_parser, certain.reasoning)
    )
    if not names.tool and names.reasoning in ("", output_parsers.BY_MARKS):
        return output_parsers.text_parsing(tokenizer, thinks=bool(names.reasoning))
    try:
        from libra_jax.engines import vllm_parsers  # takes seconds and 0.2 GB, which runs without parsers save
    except ImportError as error:
        raise protocols.ConfigError(
            f"config.gateway.tool_parser: outputs are read by vLLM's parsers, and vLLM cannot be imported ({error}); "
            'install it, or set tool_parser and reasoning_parser to "none"'
        ) from error
    return vllm_parsers.parsing(tokenizer, names.tool, names.reasoning)


def _name(setting: str, certain: str) -> str:
    return {"auto": certain, "none": ""}.get(setting, setting)
