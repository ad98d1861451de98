"""Text of models and tools, made safe to show."""

from __future__ import annotations

import json
import unicodedata

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax.telemetry import escapes, files


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("\x1b]8;;http://evil\x07link\x1b]8;;\x07", r"\x1b]8;;http://evil\x07link\x1b]8;;\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("invoice\u202efdp.exe", r"invoice\u202efdp.exe"),
        ("two\nlines\r", r"two\nlines\r"),
        ("hidden\U000e0041", r"hidden\U000e0041"),
        ("plain ä 中 👩\u200d🔬 | [bold]", "plain ä 中 👩\u200d🔬 | [bold]"),
    ],
)
def test_control_and_bidirectional_characters_are_spelled_out(text, shown):
    assert escapes.visible(text) == shown


def test_lines_and_tabs_stay_where_they_are_wanted():
    assert escapes.visible("a\n\tb\r\x1b", lines=True) == "a\n\tb\\r\\x1b"


@hypothesis.given(st.text(st.characters(), max_size=50))
def test_nothing_that_is_shown_controls_a_terminal_and_json_reads_back_the_same(text):
    shown = escapes.visible(text)
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in shown)
    assert not any(unicodedata.bidirectional(c) in ("LRO", "RLO", "LRI", "RLI", "FSI", "PDI", "LRE") for c in shown)
    shown.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        line = files.json_line({"text": text})
        assert json.loads(line) == {"text": text}
        assert not any(unicodedata.category(c) == "Cc" for c in line.decode().removesuffix("\n"))
