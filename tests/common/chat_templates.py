"""Chat templates of the kinds that models have, and a tokenizer made here that knows their marks.

They are written here, in the manner of the models that they are named after.
"""

import json

import pytest

THINKS = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n<tools>' -}}{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nWrite <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set body = m.content -%}{%- set thought = '' -%}
{%- if m.reasoning_content is defined and m.reasoning_content -%}
{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in m.content -%}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] -%}
{%- set body = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + body.lstrip('\\n') -}}
{%- else -%}{{- body -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if not loop.first or body -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif not (m.role == 'system' and loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""In the manner of Qwen3: reasoning is kept after the last question only."""

PLAIN = """
{%- if tools -%}
{{- '<|im_start|>system\\nYou help.\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{{- '<|im_start|>assistant' -}}{%- if m.content -%}{{- '\\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""In the manner of Qwen2.5: a system message of its own, no reasoning."""

HEADERS = """
{{- '<|bos|>' -}}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start|>system<|header|>\\n\\n' -}}
{%- if tools -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}{{- system + '<|eot|>' -}}
{%- if tools -%}
{{- '<|start|>user<|header|>\\n\\nFunctions:\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson(indent=4)) + '\\n\\n' -}}{%- endfor -%}
{{- (rest[0].content | trim) + '<|eot|>' -}}{%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if m.role == 'tool' -%}
{{- '<|start|>ipython<|header|>\\n\\n' + ({'output': m.content} | tojson) + '<|eot|>' -}}
{%- elif 'tool_calls' in m -%}
{%- if m.tool_calls | length > 1 -%}{{- raise_exception('one call at a time, please') -}}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '<|start|>assistant<|header|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
{{- (call.arguments | tojson) + '}<|eot|>' -}}
{%- else -%}{{- '<|start|>' + m.role + '<|header|>\\n\\n' + (m.content | trim) + '<|eot|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant<|header|>\\n\\n' -}}{%- endif -%}
"""
"""In the manner of Llama 3.1: one call a message, in whose place no other text is written."""

NAMES = """
{{- '<|bos|>' -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if m.name is not defined -%}{{- raise_exception('a tool message needs a name') -}}{%- endif -%}
{{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' + m.name + '", "content": ' + (m.content | tojson) -}}
{{- '}\\n</tool_response><|im_end|>\\n' -}}
{%- elif m.role == 'assistant' and m.tool_calls is defined -%}
{{- '<|im_start|>assistant' -}}
{%- for call in m.tool_calls -%}
{{- '\\n<tool_call>\\n{"arguments": ' + (call.function.arguments | tojson) + ', "name": "' -}}
{{- call.function.name + '"}\\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""In the manner of Hermes: tool messages need the tool's name; no text beside calls."""

PARTS = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'tool' -%}{{- m.content -}}
{%- else -%}{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""In the manner of multi-modal models: content is a list of parts."""

OPENS = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""In the manner of DeepSeek-R1: the header opens the reasoning, which no later context shows."""

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def save(folder, template, eos="<|im_end|>"):
    """A byte-level BPE tokenizer directory, made here."""
    hf = pytest.importorskip("tokenizers")
    bpe = hf.Tokenizer(hf.models.BPE())
    bpe.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = hf.decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|start|>", "<|header|>", "<|eot|>"]
    trainer = hf.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*specials, "<|python_tag|>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(["user assistant system tool_response 12 34 error answer \n\n"] * 4, trainer)
    bpe.add_tokens([hf.AddedToken(text, special=False, normalized=False) for text in MARKS])
    folder.mkdir(exist_ok=True, parents=True)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<|endoftext|>"}
    if template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
