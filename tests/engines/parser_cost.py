"""The CPU time that a parser takes for one output: `python tests/engines/parser_cost.py`.

The output has 367 tokens of a byte-level tokenizer, a thought, a call and 12 offered tools. It comes by 16 tokens.
"""

import pathlib
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "common"))

import chat_templates

from libra_jax import protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.engines import vllm_parsers
from libra_jax.rollouts import outputs

ROUNDS = 100
ARGUMENTS = {"type": "object", "properties": {"q": {"type": "string", "description": "x" * 100}}}
TOOLS = [protocols.ToolSpec(f"tool{number}", "does things " * 10, ARGUMENTS) for number in range(12)]
TEXT = (
    "<think>\nLet me think about it for some time, and then call.\n</think>\n\nI will look it up. "
    + "word " * 60
    + '\n<tool_call>\n{"name": "tool1", "arguments": {"q": "abc"}}\n</tool_call>'
)


def milliseconds(form: protocols.ChatFormat, output: list[int]) -> float:
    began = time.process_time()
    for _ in range(ROUNDS):
        reader = outputs.Reader(form, form.parser(TOOLS, range(3000)), ())
        for at in range(0, len(output), 16):
            reader.feed(output[at : at + 16])
        reader.finish()
    return (time.process_time() - began) / ROUNDS * 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = chat_templates.save(pathlib.Path(folder) / "tokenizer", chat_templates.THINKS)
        tokenizer = tokenizers.load(path, incremental=False)
        output = tokenizer.encode(TEXT)
        for names in (("", ""), ("hermes", ""), ("hermes", "qwen3"), ("qwen3_xml", "qwen3")):
            parsing = vllm_parsers.parsing(tokenizer, *names)
            form = chat_format.HuggingFaceFormat(tokenizer, parsing)
            print(f"{names}: {min(milliseconds(form, output) for _ in range(3)):.2f} ms a request")


if __name__ == "__main__":
    main()
