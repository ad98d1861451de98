"""A mesh that changes between two steps: not a bit of the state changes, nor does what is learnt."""

import dataclasses
import itertools
import weakref

import jax
import numpy as np
import pytest
from trainer_doubles import compilations

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.training import learner as learner_lib
from libra_jax.training import resize
from libra_jax.training import step as step_lib
from libra_jax.weights import memfd

RATE = 3e-3
ALGORITHM = config_lib.AlgorithmConfig(clip_low=0.99)
ADAM = config_lib.OptimizerConfig(name="adam", eps=1e-6)
SIZES = [(8, 1, 1), (2, 2, 1), (1, 2, 1), (2, 2, 2), (1, 1, 1), (1, 4, 2)]
PATIENCE = 120.0


# A further layer is another slice of the same arrays, which move as one.
@pytest.fixture(scope="module")
def small(shallow):
    return shallow


@pytest.fixture(scope="module")
def sparse(shallow_sparse):
    return shallow_sparse


def _beginning(small):
    """A maker of learners that have taken a step, with the batch that they were given."""

    def make(sizes=(8, 1, 1), rows=8):
        mesh = dataclasses.asdict(protocols.MeshSizes(*sizes))
        trainer = {**mesh, "rows_per_micro_batch": rows}
        config = small.config(trainer=trainer, algorithm=ALGORITHM, optimizer=ADAM)
        made = small.learner(config)
        packed = packing.pack(small.examples(rows, longest=20), config.trainer)
        advantages = list(np.random.default_rng(1).uniform(-1.5, -0.5, rows))
        extras = [{"advantages": array} for array in packed.scatter(advantages)]

        def step(learner):
            return learner.update(step_lib.POLICY, packed, RATE, extras)["loss"]

        step(made)
        return made, step

    return make


@pytest.fixture(scope="module")
def begun(small):
    """A learner on all eight devices that has taken a step, and the batch it was given."""
    return _beginning(small)


# The model with experts has all that the dense one has.
@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.drill), "sparse"])
def begun_of_each(request):
    """The same, of a dense model and of one with experts."""
    return _beginning(request.getfixturevalue(request.param))


def resized(learner, sizes, **arguments):
    return resize.MeshChange(learner, protocols.MeshSizes(*sizes), jax.devices(), **arguments).take_over(PATIENCE)


def on_host(learner):
    return [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(learner.state))]


def test_no_bit_of_the_state_changes_over_a_chain_of_meshes(begun_of_each):
    learner, step = begun_of_each()
    for sizes in [(4, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 8), (8, 1, 1)]:
        before = on_host(learner)
        following, phases = resized(learner, sizes)
        assert learner.state is None
        for leaf, place in zip(jax.tree.leaves(following.state), jax.tree.leaves(following.layout.state), strict=True):
            assert leaf.sharding == place.sharding
        assert all(np.array_equal(a, b) for a, b in zip(on_host(following), before, strict=True))
        assert (phases.moved_bytes == 0) == (sizes in ((4, 1, 1), (1, 2, 1)))  # these held it all before
        compiled = len(following.programs.shapes)
        step(following)
        assert len(following.programs.shapes) == compiled  # nothing was left to compile
        learner = following


def test_no_bit_changes_where_the_mesh_splits_rows_and_it_learns_the_same(sparse):
    begun = _beginning(sparse)
    steady, step = begun((4, 1, 1, 2))
    wanted = [step(steady) for _ in range(2)]
    learner, step = begun((4, 1, 1, 2))
    got = []
    for sizes in [(1, 2, 2, 2), (2, 2, 1)]:  # 8 devices, then as many, and 4 whose rows are whole
        before = on_host(learner)
        learner, _ = resized(learner, sizes)
        assert dict(learner.layout.mesh.shape)["context"] == protocols.MeshSizes(*sizes).context
        assert all(np.array_equal(a, b) for a, b in zip(on_host(learner), before, strict=True))
        got.append(step(learner))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_a_mesh_of_six_is_accepted_where_rows_divide_and_takes_the_same_steps(begun):
    steady, step = begun(rows=24)
    wanted = [step(steady) for _ in range(3)]
    learner, step = begun(rows=24)
    got = []
    for sizes in [(6, 1, 1), (4, 1, 1), (6, 1, 1)]:  # fewer devices each time, and more
        held = on_host(learner)  # parameters, moments, step and random key
        learner, _ = resized(learner, sizes)
        assert learner.layout.mesh.size == np.prod(sizes)
        assert all(np.array_equal(a, b) for a, b in zip(on_host(learner), held, strict=True))
        got.append(step(learner))
    assert learner.state.step == 4
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.drill  # what it adds to the two tests above is the length of the curve
def test_sixty_steps_with_four_resizes_lose_as_those_of_one_mesh(begun_of_each):
    steady, step = begun_of_each()
    wanted = [step(steady) for _ in range(60)]
    learner, step = begun_of_each()
    got = []
    for sizes in [(8, 1, 1), (2, 2, 1), (1, 2, 1), (1, 2, 4), (4, 1, 2)]:
        if len(got):
            learner, _ = resized(learner, sizes)
        got += [step(learner) for _ in range(12)]
    assert wanted[-1] < 0.8 * wanted[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_no_more_than_one_leaf_is_held_twice_while_the_state_moves(begun, monkeypatch):
    learner, _ = begun()
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(learner.state)]
    put, left = resize._put, []

    def counted(leaf, target):
        left.append(sum(item() is not None for item in old))
        return put(leaf, target)

    monkeypatch.setattr(resize, "_put", counted)
    resized(learner, (2, 2, 1))
    assert left == list(range(len(old), 0, -1))
    assert not any(item() is not None for item in old)


def test_training_goes_on_while_the_new_mesh_compiles_and_its_steps_count(begun):
    steady, step = begun()
    wanted = [step(steady) for _ in range(3)]
    learner, step = begun()
    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    got = [step(learner), step(learner)]
    learner, _ = begins.take_over(PATIENCE)
    assert begins.progress == protocols.ResizeProgress(1, 1, ready=True)
    got.append(step(learner))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_shape_that_training_meets_while_it_compiles_is_compiled_too(begun, monkeypatch):
    learner, _ = begun()
    compile_, met = step_lib.Programs.compile, []

    def meeting(programs, name, batch):
        if not met and programs is not learner.programs:
            met.append(True)
            learner.compile(step_lib.SUPERVISED)
        compile_(programs, name, batch)

    monkeypatch.setattr(step_lib.Programs, "compile", meeting)
    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    following, _ = begins.take_over(PATIENCE)
    assert begins.progress == protocols.ResizeProgress(2, 2, ready=True)
    assert len(following.programs.shapes) == 2


def test_where_replicas_help_their_sums_are_added_at_once_on_each_mesh(small):
    config = small.config(trainer={"data": 8}, optimizer=ADAM)
    rollout = dataclasses.replace(config.rollout, tensor_parallel=(1, 1))
    elastic = config_lib.ElasticConfig(hybrid=1)
    learner = small.learner(dataclasses.replace(config, rollout=rollout, elastic=elastic))
    learner.compile(step_lib.POLICY)
    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    begins.compilation.wait(PATIENCE)
    ones = [np.ones(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(learner.layout.accumulator)]
    received = step_lib.Received(ones, {"metrics": {}, "maxima": {}})
    for programs in (learner.programs, begins.take_over(PATIENCE)[0].programs):
        accumulator = programs.zeros()
        with compilations() as compiled:
            added = programs.add(programs.add(accumulator, received), received)
        assert all((np.array(leaf) == 2).all() for leaf in jax.tree.leaves(added))
        assert not compiled


def test_a_resize_that_is_cancelled_leaves_the_learner_as_it_was(begun):
    learner, step = begun()
    before = on_host(learner)
    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    assert begins.compilation.cancel(PATIENCE)
    with pytest.raises(protocols.LibraError, match="data 4 x fsdp 1 x tensor 1 was cancelled"):
        begins.take_over(PATIENCE)
    assert all(np.array_equal(a, b) for a, b in zip(on_host(learner), before, strict=True))
    step(learner)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            (6, 1, 1),
            r"data 6 x fsdp 1 x tensor 1 cannot be: .*rows_per_micro_batch: 8 does not divide over .* 6 shards",
        ),
        ((1, 1, 6), r"does not divide"),
        ((0, 1, 1), r"trainer.data: must be positive, not 0"),
        ((8, 2, 1), r"rows_per_micro_batch: 8 does not divide"),
        ((8, 1, 2), r"needs 16 devices and there are 8"),
        ((8, 1, 1), r"mesh is data 8 x fsdp 1 x tensor 1 already"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_and_training_goes_on(begun, sizes, sentence):
    learner, step = begun()
    with pytest.raises(protocols.ConfigError, match=sentence):
        resize.MeshChange(learner, protocols.MeshSizes(*sizes), jax.devices())
    step(learner)


def test_too_little_room_is_refused_with_what_it_takes(begun):
    learner, step = begun((1, 8, 1))
    with pytest.raises(protocols.LibraError, match=r"takes up to \d+\.\d MiB more on a device, .* has 0\.0 MiB"):
        resized(learner, (1, 2, 1), free_bytes=lambda devices: dict.fromkeys(devices, 10))
    step(learner)


def test_room_for_state_and_gradient_sums_is_too_little_without_that_of_the_programs(begun):
    learner, step = begun((1, 8, 1))
    rooms = [2**40]
    begins = resize.MeshChange(
        learner,
        protocols.MeshSizes(1, 2, 1),
        jax.devices(),
        free_bytes=lambda devices: dict.fromkeys(devices, rooms[-1]),
    )
    before, after = learner.layout, begins._next.layout
    stays = sum(
        max(bytes_held(there).values()) - max(bytes_held(here).values())
        for here, there in ((before.state, after.state), (before.accumulator, after.accumulator))
    )
    assert begins.estimate.step_bytes == stays + 4 * learner.programs.temporary_bytes()  # a guess: a quarter of devices
    begins.compilation.wait(PATIENCE)
    program = begins._next.programs.temporary_bytes()
    assert stays + program > begins.estimate.peak_bytes
    rooms.append(stays + program - 1)
    with pytest.raises(protocols.LibraError, match=r"more on a device, and .*; raise trainer.fsdp"):
        begins.take_over(PATIENCE)
    step(learner)
    rooms.append(stays + program)
    following, _ = begins.take_over(PATIENCE)
    assert begins.estimate.step_bytes == stays + program
    step(following)


def test_room_that_others_took_while_it_compiled_is_missed_at_the_take_over_and_training_goes_on(begun):
    learner, step = begun((1, 8, 1))
    rooms = iter([2**30, 10])
    begins = resize.MeshChange(
        learner, protocols.MeshSizes(1, 2, 1), jax.devices(), free_bytes=lambda all: dict.fromkeys(all, next(rooms))
    )
    with pytest.raises(protocols.LibraError, match=r"has 0\.0 MiB"):
        begins.take_over(PATIENCE)
    step(learner)


def test_the_room_of_cpu_devices_is_what_a_container_leaves_them(begun, monkeypatch):
    learner, _ = begun((1, 8, 1))
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**10)
    with pytest.raises(protocols.LibraError, match=r"has 0\.0 MiB; raise trainer.fsdp"):
        resized(learner, (1, 2, 1))


def test_devices_that_do_not_say_what_room_they_have_are_counted(begun):
    class Silent:
        platform = "gpu"

        def memory_stats(self):
            return None

    assert resize._free_bytes([Silent(), Silent()]) == {}
    learner, _ = begun()
    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices(), free_bytes=lambda devices: {})
    assert begins.estimate.unchecked == 4
    begins.compilation.cancel(PATIENCE)


@pytest.mark.parametrize("failing", [0, 3, 9])
def test_a_move_that_the_devices_refuse_half_way_is_undone(begun, monkeypatch, failing):
    learner, step = begun()
    before, put, calls = on_host(learner), resize._put, itertools.count()

    def refusing(leaf, target):
        if next(calls) == failing:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(leaf, target)

    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    monkeypatch.setattr(resize, "_put", refusing)
    with pytest.raises(protocols.LibraError, match=r"stays \(RESOURCE_EXHAUSTED: out of memory\)"):
        begins.take_over(PATIENCE)
    assert all(np.array_equal(a, b) for a, b in zip(on_host(learner), before, strict=True))
    step(learner)


def test_a_state_that_no_device_takes_is_lost_with_a_sentence(begun, monkeypatch):
    learner, _ = begun()
    put, calls = resize._put, itertools.count()

    def refusing(leaf, target):
        if next(calls) >= 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(leaf, target)

    begins = resize.MeshChange(learner, protocols.MeshSizes(4, 1, 1), jax.devices())
    monkeypatch.setattr(resize, "_put", refusing)
    with pytest.raises(protocols.LibraError, match=r"is lost \(RESOURCE_EXHAUSTED.*goes on from the last checkpoint"):
        begins.take_over(PATIENCE)
    assert learner.state is None


@pytest.mark.parametrize("holds_sums", [False, True])
@pytest.mark.parametrize("pair", itertools.permutations(SIZES, 2), ids=str)
def test_the_estimate_is_what_counting_elements_one_by_one_gives(small, pair, holds_sums):
    before, after = (layout_of(small, sizes) for sizes in pair)
    held: dict[jax.Device, int] = {}
    arriving = peak = largest = 0
    for leaf in jax.tree.leaves(before.accumulator) if holds_sums else ():
        for device, gone in elements(leaf).items():
            held[device] = held.get(device, 0) - 4 * len(gone)
    for old, new in zip(jax.tree.leaves(before.state), jax.tree.leaves(after.state), strict=True):
        size = np.dtype(old.dtype).itemsize
        largest = max(largest, size * int(np.prod(old.shape)))
        had, has = elements(old), elements(new)
        for device, wanted in has.items():
            arriving += size * len(wanted - had.get(device, set()))
            held[device] = held.get(device, 0) + size * len(wanted)
            peak = max(peak, held[device])
        for device, gone in had.items():
            held[device] = held.get(device, 0) - size * len(gone)
    if not holds_sums:
        assert peak <= largest + arriving
    for leaf in jax.tree.leaves(after.accumulator):
        for device, wanted in elements(leaf).items():
            held[device] = held.get(device, 0) + 4 * len(wanted)
            peak = max(peak, held[device])
    made = resize.estimate(before, after, holds_sums=holds_sums, program_bytes=2**30)
    assert (made.arriving_bytes, made.peak_bytes) == (arriving, max(peak, *held.values()))
    assert made.step_bytes == max(held[device] for device in after.mesh.devices.flat) + 2**30


def layout_of(small, sizes):
    data, fsdp, tensor = sizes
    config = small.config(trainer={"data": data, "fsdp": fsdp, "tensor": tensor}, optimizer=ADAM)
    return learner_lib.Learner(config, small.shape, jax.devices()).layout


def bytes_held(tree):
    """Of each device, the bytes of all leaves."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for device, numbers in elements(leaf).items():
            held[device] = held.get(device, 0) + np.dtype(leaf.dtype).itemsize * len(numbers)
    return held


def elements(leaf):
    """Of each device, the numbers of the elements that it holds."""
    numbers = np.arange(int(np.prod(leaf.shape))).reshape(leaf.shape)
    places = leaf.sharding.devices_indices_map(leaf.shape)
    return {device: set(np.ravel(numbers[part]).tolist()) for device, part in places.items()}
