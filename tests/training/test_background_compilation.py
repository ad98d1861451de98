"""Programs of longer rows compile beside the steps: no step stops for one, and none is compiled twice."""

import gc
import threading
import weakref

import pytest
import trainer_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.training import background, step

PATIENCE = 120.0
ROWS = {"data": 2, "row_tokens": 40, "row_buckets": (64,)}
REFERENCE = config_lib.AlgorithmConfig(kl_coefficient=0.1)
LONG = 64


@pytest.fixture
def compiled(monkeypatch):
    """Names, row lengths and threads of the programs that are compiled; `gate` holds up those of the other threads."""
    compile_, seen = step.Programs._compile, []

    def watched(programs, name, batch):
        seen.append((name, batch["tokens"].shape[1] if batch else 0, threading.current_thread()))
        watching.gate(threading.current_thread())
        return compile_(programs, name, batch)

    def watching(*where):
        return [thread for name, row_tokens, thread in seen if (name, row_tokens) == where]

    watching.gate = lambda thread: None
    monkeypatch.setattr(step.Programs, "_compile", watched)
    return watching


def _batch(small, version, *, longer=False):
    """A batch whose longest trajectory fits the short rows, or only the long ones. Both have at most 64 tokens: the
    small program of advantages is compiled for each power of two."""
    made, tokens = doubles.batch(small, version), 40 if longer else 24
    delta = protocols.TokenDelta((3,) * tokens, (-2.7,) * tokens, (version,) * tokens)
    made.groups[1].trajectories[2].append_sampled(delta)
    return made


def test_a_later_step_over_longer_rows_compiles_nothing_on_any_mesh(small, start_trainer):
    actor = start_trainer(trainer=ROWS)
    former = weakref.ref(actor.running().learner.programs)
    for version, sizes in ((0, None), (2, protocols.MeshSizes(4, 1, 1))):
        if sizes is not None:
            actor.begin_resize(sizes)
            actor.finish_resize(PATIENCE)
        assert actor.train_step(_batch(small, version))["micro_batches"] == 1
        assert actor.running().learner.ahead.wait(PATIENCE)
        with doubles.compilations() as seen:
            metrics = actor.train_step(_batch(small, version + 1, longer=True))
        assert metrics["micro_batches"] == 2
        assert not seen
        assert metrics["train/compile_seconds"] == 0
    gc.collect()
    assert former() is None, "the programs of the former mesh are still held"


def test_a_step_waits_for_a_program_that_is_being_compiled(small, start_trainer, compiled, monkeypatch):
    reached, needed = threading.Event(), threading.Event()
    need = step.Programs._needed

    def hold(thread):
        if thread is not threading.main_thread():
            reached.set()
            assert needed.wait(PATIENCE)

    def needing(programs, name, batch=None):
        needed.set()
        return need(programs, name, batch)

    compiled.gate = hold
    monkeypatch.setattr(step.Programs, "_needed", needing)
    actor = start_trainer(trainer=ROWS, algorithm=REFERENCE)
    assert reached.wait(PATIENCE)
    metrics = actor.train_step(_batch(small, 0, longer=True))
    assert {name: len(compiled(name, LONG)) for name in ("score", "policy")} == {"score": 1, "policy": 1}
    assert len(compiled("score", ROWS["row_tokens"])) == 1
    assert metrics["train/compile_seconds"] > 0
    assert actor.train_step(_batch(small, 1, longer=True))["train/compile_seconds"] == 0


def test_a_shutdown_waits_for_the_program_that_is_being_compiled(start_trainer, compiled):
    go = threading.Event()
    compiled.gate = lambda thread: thread is threading.main_thread() or go.wait(PATIENCE)
    actor = start_trainer(trainer=ROWS)
    learner = actor.running().learner
    assert not learner.ahead.wait(0.0)
    threading.Timer(0.2, go.set).start()
    actor.shutdown()
    assert learner.ahead.wait(0.0)


def test_an_error_beside_the_steps_is_told_once_and_the_step_compiles(small, start_trainer, compiled, caplog):
    def fail(thread):
        if thread is not threading.main_thread():
            raise RuntimeError("no room for it\nand much more")

    compiled.gate = fail
    actor = start_trainer(trainer=ROWS)
    assert actor.running().learner.ahead.wait(PATIENCE)
    metrics = [actor.train_step(_batch(small, version, longer=True)) for version in (0, 1)]
    (record,) = caplog.records
    assert "cannot be compiled ahead of the step that needs it (no room for it)" in record.getMessage()
    assert metrics[0]["train/compile_seconds"] > 0
    threads = compiled("policy", LONG)
    assert len(threads) == 2
    assert threads[1] is threading.main_thread()


def test_a_cancelled_compilation_ends_after_its_program_and_stays_ended():
    begun, go, done = threading.Event(), threading.Event(), []

    class Programs:
        def compile(self, name, batch):
            begun.set()
            assert go.wait(PATIENCE)
            done.append(name)

    compilation = background.Compilation(Programs(), lambda: [("one", {}), ("two", {})], "compile")
    compilation.begin()
    assert begun.wait(PATIENCE)
    assert not compilation.cancel(0.0)
    assert compilation.running
    go.set()
    assert compilation.cancel(PATIENCE)
    compilation.begin()
    assert not compilation.running
    assert done == ["one"]
    assert compilation.done == 1
