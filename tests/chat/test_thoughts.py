"""What of an output is thought and what is answer, by the marks in it and by the end of its context."""

import pytest

from libra_jax.chat import thoughts


@pytest.mark.parametrize(
    ("output", "thought", "answer"),
    [
        ("so", "", "so"),
        ("<think>hm</think>\n\nso", "hm", "\n\nso"),
        ("<think>maybe 42", "maybe 42", ""),
        ("<think>a</think>so<think>maybe 42", "amaybe 42", "so"),
        ("<think>a</think>so<think>b</think> 7", "ab", "so 7"),
        ("<think>a<think>b</think>so", "a<think>b", "so"),
        ("hm</think>so", "hm", "so"),
        ("x<think>a</think>y</think>so", "xay", "so"),
        ("[THINK]a</think>b[/THINK]so", "a</think>b", "so"),
        ("<|channel>thought\nhm\n<channel|>so", "\nhm\n", "so"),
        ("<thinking>hm</thinking>", "", "<thinking>hm</thinking>"),
        ("", "", ""),
    ],
)
def test_an_output_is_split_at_its_marks(output, thought, answer):
    assert thoughts.split(output) == (thought, answer)


CHATML = "<|im_start|>assistant\n"
# The ends of contexts, as 72 public chat templates write them for a question without further settings.
ENDS = {
    "<\uff5cAssistant\uff5c><think>\n": "<think>\n",  # DeepSeek-R1 distilled, DeepSeek-V3
    f"{CHATML}<think>\n": "<think>\n",  # Nemotron 3 (four models), Qwen3.5, Qwen3.6, Qwen3.8
    f"{CHATML}<think>\n\n</think>\n\n": "",  # Qwen3.5 without thinking
    CHATML: "",  # Qwen2.5, Qwen3, LFM2
    "<|assistant|>": "",  # GLM 4.5
    "<|turn>model\n": "",  # Gemma 4
    "<|turn>model\n<|channel>thought\n": "<|channel>thought\n",  # Gemma 4 after a tool's return
    "<start_of_turn>model\n": "",
    "<|start|>assistant": "",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>": "",
    "<|start_header_id|>assistant<|end_header_id|>\n\n": "",
    "<|end|>\n<|assistant|>\n": "",
    "Assistant:": "",
    "": "",
}


@pytest.mark.parametrize(("end", "opening"), ENDS.items())
def test_a_context_opens_a_thought_where_the_template_does(end, opening):
    assert thoughts.opening(f"<|user|>what is <think>?{end}") == opening
