"""Compiled programs on disk: where they are kept, and that a second learner takes them from there."""

import pathlib

import jax
import pytest
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from libra_jax import protocols
from libra_jax.training import program_cache, step


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """JAX without a cache, and a home directory of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    names = ("compilation_cache_dir", "compilation_cache_max_size", "persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()


def test_programs_compiled_ahead_of_time_are_taken_from_the_cache(unset, small):
    assert program_cache.use(str(unset / "programs"), "cpu") == unset / "programs"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    events, memory = [], []
    listen = lambda name, **_: events.append(name)  # noqa: E731
    monitoring.register_event_listener(listen)
    try:
        for hits in (0, 2):  # grad_step and apply_step
            events.clear()
            learner = small.learner(small.config())
            learner.compile(step.POLICY)
            memory.append(learner.programs.temporary_bytes())
            assert events.count("/jax/compilation_cache/cache_hits") >= hits
            assert bool(events.count("/jax/compilation_cache/cache_misses")) == (not hits)
        assert memory[0] == memory[1] > 0  # what a resize plans with
    finally:
        monitoring.unregister_event_listener(listen)


@pytest.mark.parametrize(
    ("setting", "platform", "kept"),
    [
        ("auto", "gpu", "home/libra_jax/programs"),
        ("auto", "tpu", "home/libra_jax/programs"),
        ("auto", "cpu", None),
        ("off", "gpu", None),
        ("named", "cpu", "named"),
    ],
)
def test_programs_are_kept_where_the_setting_says(setting, platform, kept, unset, monkeypatch):
    monkeypatch.chdir(unset)
    directory = program_cache.use(setting, platform)
    assert jax.config.jax_compilation_cache_dir == (kept and str(unset / kept))
    assert (directory is None) == (kept is None)
    if kept:
        assert (unset / kept).stat().st_mode & 0o777 == 0o700
        assert jax.config.jax_compilation_cache_max_size == program_cache.MAX_BYTES


def test_a_cache_that_the_user_set_is_left_alone(unset):
    jax.config.update("jax_compilation_cache_dir", "theirs")
    assert program_cache.use(str(unset / "ours"), "gpu") is None
    assert jax.config.jax_compilation_cache_dir == "theirs"


def test_a_named_path_that_cannot_be_made_is_refused(unset):
    pathlib.Path(unset / "file").touch()
    with pytest.raises(protocols.ConfigError, match=r"compilation_cache: .*file/programs cannot be made \(Not a dir"):
        program_cache.use(str(unset / "file" / "programs"), "gpu")
