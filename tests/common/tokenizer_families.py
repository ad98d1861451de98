"""Small tokenizers with the normalizers, pre-tokenizers and added tokens of public families, and templates for them."""

import json

import pytest

TEXTS = [
    "the answer is 42",
    "user assistant system tool",
    "<|user|> [INST] hello world",
    "a b  c\n\n d é",
    "3.5 + 4 = 7.5",
]
CONTROLS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>")
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<turn_user>", "<turn_model>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

ZEPHYR = """
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""In the manner of Zephyr: roles are plain text, and the assistant's header ends before a line break."""

INST = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- else -%}{{- '[INST] ' + m.content + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}
"""
"""In the manner of Mistral: no header, and a space in front of each answer."""

TRIMS = """
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n\\n' + m.content | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n\\n' -}}{%- endif -%}
"""
"""In the manner of Llama 3: contents are trimmed."""

CHATML = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

ENDS = """
{%- for m in messages -%}{{- '<|im_start|>' + m.role + m.content + '<|end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}{%- endif -%}
"""
"""In the manner of Phi-3: the end of a turn takes the white space after it."""

TURNS = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<turn_model>' + m.content + eos_token -}}
{%- else -%}{{- '<turn_user>' + m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<turn_model>' -}}{%- endif -%}
"""
"""In the manner of DeepSeek: the tokenizer does not call the marks of roles special."""

TEMPLATES = {"ZEPHYR": ZEPHYR, "INST": INST, "TRIMS": TRIMS, "CHATML": CHATML, "ENDS": ENDS, "TURNS": TURNS}


def _sentencepiece(hf, normalizer, pre_tokenizer, model="BPE"):
    if model == "Unigram":
        # The pieces that control tokens have in such a vocabulary would be the likeliest of all.
        pieces = sorted(
            {*"".join((*TEXTS, *CONTROLS)), "\u2581", *" ".join(TEXTS).split(), "\u2581answer", "\u2581user"}
        )
        vocabulary = [*((text, 0.0) for text in CONTROLS), *((text, -9.0 + len(text)) for text in pieces)]
        made = hf.Tokenizer(hf.models.Unigram(vocabulary, unk_id=0))
    else:
        trainer = hf.trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*CONTROLS, *BYTES], show_progress=False, initial_alphabet=["\u2581", "\n"]
        )
        made = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        made.train_from_iterator(TEXTS * 3, trainer)
        values = json.loads(made.to_str())
        # Bytes are no added tokens, but for training.
        values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in CONTROLS]
        made = hf.Tokenizer.from_str(json.dumps(values))
    made.add_special_tokens([hf.AddedToken(text, special=True, normalized=False) for text in CONTROLS[:-1]])
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer
    made.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()])
    return made


def _byte_level(hf, add_prefix_space):
    made = hf.Tokenizer(hf.models.BPE())
    made.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=360, special_tokens=[*CONTROLS], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    return made


def families(hf):
    """Makes a tokenizer of each family, by name."""
    space, pre = hf.normalizers, hf.pre_tokenizers

    def metaspace(scheme):
        return pre.Metaspace(prepend_scheme=scheme, split=False)

    llama = space.Sequence([space.Prepend("▁"), space.Replace(" ", "▁")])
    return {
        "byte_level": lambda: _byte_level(hf, False),
        "byte_level_prefix": lambda: _byte_level(hf, True),
        "llama_normalizer": lambda: _sentencepiece(hf, llama, None),
        "metaspace_always": lambda: _sentencepiece(hf, None, metaspace("always")),
        "metaspace_first": lambda: _sentencepiece(hf, None, metaspace("first")),
        "metaspace_never": lambda: _sentencepiece(hf, None, metaspace("never")),
        "unigram": lambda: _sentencepiece(hf, None, metaspace("first"), "Unigram"),
    }


def save(folder, family, template):
    """Writes the directory of a tokenizer with a chat template."""
    hf = pytest.importorskip("tokenizers")
    made = families(hf)[family]()
    made.add_special_tokens([hf.AddedToken("<|end|>", special=True, rstrip=True, normalized=False)])
    made.add_tokens([hf.AddedToken(text, special=False, normalized=False) for text in MARKS])
    folder.mkdir(exist_ok=True, parents=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
