"""What a script prints when its work fails, whatever it fails with."""

import pytest

import cli
from libra_jax import protocols


def failing(error: BaseException) -> int:
    def main() -> None:
        raise error

    return cli._guarded(main)


def test_an_unforeseen_error_is_one_line_that_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.delenv("LIBRA_JAX_TRACEBACK", raising=False)
    assert failing(ValueError("too\nlong")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ValueError: too long (unforeseen: LIBRA_JAX_TRACEBACK=1 ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("too long"), protocols.DataError("no such file")])
def test_the_traceback_is_shown_where_it_is_asked_for(error, capsys, monkeypatch):
    monkeypatch.setenv("LIBRA_JAX_TRACEBACK", "1")
    assert failing(error) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "unforeseen" not in shown


def test_foreseen_errors_interrupts_and_exits_stay_what_they_are(capsys, monkeypatch):
    monkeypatch.delenv("LIBRA_JAX_TRACEBACK", raising=False)
    assert failing(protocols.ConfigError("config.steps: must be positive")) == 1
    assert capsys.readouterr().err == "error: config.steps: must be positive\n"
    assert failing(KeyboardInterrupt()) == 130
    assert "goes on from the last checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="3"):
        failing(SystemExit(3))
    assert cli._guarded(lambda: None) == 0
    assert cli._guarded(lambda: 4) == 4
