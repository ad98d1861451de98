"""Text of tokens that arrive one by one, against the stream of Hugging Face's tokenizers, and against the whole."""

import functools
import itertools

import property_counts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.chat import output_parsers

hf = pytest.importorskip("tokenizers")

WORDS = ("▁the", "▁cat", "s", "é", "😀", "中", "\N{REPLACEMENT CHARACTER}", "\n", "<", "think>")
BYTES = (0x41, 0x80, 0x9F, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x98, 0xFF)


def byte_level():
    """As GPT-2, Llama 3 and Qwen: each token is some bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    for word in WORDS:
        vocabulary.setdefault("".join(letters[byte] for byte in word.replace("▁", " ").encode()), len(vocabulary))
    bpe = hf.Tokenizer(hf.models.BPE(vocabulary, []))
    bpe.decoder = hf.decoders.ByteLevel()
    return bpe


def byte_fallback():
    """As Llama 2, Mistral and Gemma: words with a mark for spaces, and bytes for what is no word."""
    vocabulary = {word: index for index, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    bpe = hf.Tokenizer(hf.models.BPE(vocabulary, [], byte_fallback=True))
    steps = (hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse())
    bpe.decoder = hf.decoders.Sequence([*steps, hf.decoders.Strip(" ", 1, 0)])
    return bpe


class Decoder:
    """A tokenizer of the library ; counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, token_ids):
        self.count += len(token_ids)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@functools.cache
def tokens_of(name):
    """Tokens of one or more bytes, broken ones too."""
    tokenizer = TOKENIZERS[name]
    names = [f"<0x{byte:02X}>" for byte in BYTES]
    words = [index for index in range(tokenizer.get_vocab_size()) if not tokenizer.id_to_token(index).startswith("<0x")]
    fallback = [tokenizer.token_to_id(name) for name in names]
    return [*(words[256:] or words), *(list(BYTES) if None in fallback else fallback)]


def streamed(tokenizer, tokens, cuts=()):
    """The pieces of text, the tokens coming in groups, and one of the end."""
    stream = output_parsers.TextStream(Decoder(tokenizer))
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [*(stream.feed(tokens[at:end]) for at, end in itertools.pairwise(edges)), stream.finish()]


def reference(tokenizer, tokens):
    """The library's own pieces, token by token; None where it gives up (a byte that breaks the character before)."""
    stream, pieces = hf.decoders.DecodeStream(skip_special_tokens=False), []
    try:
        for token in tokens:
            pieces.append(stream.step(tokenizer, token) or "")
    except Exception:
        return None
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 99), max_size=6))
@settings(max_examples=property_counts.examples(80, 300))
def test_text_is_that_of_the_tokenizers_own_stream(name, data, cuts):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.sampled_from(tokens_of(name)), max_size=14))
    pieces = streamed(tokenizer, tokens, range(len(tokens)))
    assert "".join(streamed(tokenizer, tokens, cuts)) == "".join(pieces)
    expected = reference(tokenizer, tokens)
    if expected is not None:
        assert pieces[: len(expected)] == expected
    if name == "byte level":  # its text is that of the bytes, whatever they are
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_the_character_after_a_broken_byte_is_kept():
    tokens = [0x9F, *"\N{GRINNING FACE}".encode(), *b"x"]
    text = "\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}x"
    assert TOKENIZERS["byte level"].decode(tokens) == text
    for size in (1, 2, 3, 9):
        assert "".join(streamed(TOKENIZERS["byte level"], tokens, range(0, 9, size))) == text


def test_a_long_run_of_broken_bytes_costs_its_length():
    for tokens in ([0x9F] * 20_000, [*[0x9F] * 10_000, *b"text" * 2500]):
        decoder = Decoder(TOKENIZERS["byte level"])
        stream = output_parsers.TextStream(decoder)
        text = "".join(stream.feed([token]) for token in tokens) + stream.finish()
        assert text == bytes(tokens).decode(errors="replace")
        assert decoder.count < 12 * len(tokens)
