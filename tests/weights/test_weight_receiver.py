"""What a replica receives, against the parameters that were published; and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.models.hf import hf_names
from libra_jax.training import losses
from libra_jax.weights import receiver, snapshot


def _shape(tied=False):
    tiny = models_config.load_preset("libra-tiny")
    return dataclasses.replace(
        tiny, num_layers=3, vocab_size=104, hidden_size=32, intermediate_size=48, tie_word_embeddings=tied
    )


def _mesh(fsdp, tensor):
    return jax.make_mesh((1, fsdp, tensor, 1), ("data", "fsdp", "tensor", "context"))


def _places(shape, dtype, mesh):
    shapes = transformer.abstract_params(shape, dtype)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        transformer.shardings(shape, mesh),
    )


@pytest.fixture
def publish(request):
    """Publishes parameters in small chunks; returns the publisher and the chunks."""

    def make(shape, params, dtype="float32", version=1, checksum=True):
        publisher = snapshot.HostSnapshot(shape, dtype, 20_000, checksum)
        request.addfinalizer(publisher.shutdown)
        count = publisher.open(version, params)
        assert count > 3
        return publisher, [publisher.stage(version, index) for index in range(count)]

    return make


def _receive(made, chunks, version=1):
    made.start(version)
    for chunk in chunks:
        made.load(chunk)
    return made.finish(version)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 2)])
def test_what_is_received_is_what_was_published_on_any_mesh_and_stays_so(publish, tied, fsdp, tensor):
    shape = _shape(tied)
    params = transformer.init_params(shape, jax.random.key(0), "float32")
    publisher, chunks = publish(shape, params)
    places = _places(shape, "float32", _mesh(fsdp, tensor))
    made = receiver.Receiver(shape, places)
    received, digest = _receive(made, reversed(chunks))  # in any order
    wanted = jax.device_get(params)
    publisher.close(1)
    assert digest == publisher.digest(1)
    publisher.open(2, jax.tree.map(lambda leaf: leaf + 1, params))
    assert jax.tree.structure(received) == jax.tree.structure(wanted)
    for leaf, old, place in zip(*map(jax.tree.leaves, (received, wanted, places)), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), old)
        assert leaf.sharding == place.sharding


def test_a_narrow_wire_rounds_matrices_and_keeps_vectors_whole(publish):
    shape = dataclasses.replace(_shape(), qkv_bias=True)
    params = jax.tree.map(lambda leaf: leaf + 0.1001, transformer.init_params(shape, jax.random.key(0), "float32"))
    vectors = {source.path for source in hf_names.weight_map(shape) if len(source.shape) == 1}
    _, chunks = publish(shape, params, "bfloat16")
    made = receiver.Receiver(shape, _places(shape, "float32", _mesh(1, 1)))
    received, _ = _receive(made, chunks)
    for path, leaf in jax.tree_util.tree_leaves_with_path(received):
        keys = tuple(key.key for key in path)
        old = params
        for key in keys:
            old = old[key]
        assert leaf.dtype == np.float32
        wanted = old if keys in vectors else old.astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


def test_gradients_of_a_bfloat16_replica_are_those_of_the_core(publish):
    shape = dataclasses.replace(_shape(), qkv_bias=True)
    params = transformer.init_params(shape, jax.random.key(0), "float32")
    params = jax.tree.map(lambda leaf: leaf + 0.01 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    _, chunks = publish(shape, params, "bfloat16")
    received, _ = _receive(receiver.Receiver(shape, _places(shape, "float32", _mesh(1, 1))), chunks)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, (1, 33)).astype(np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.arange(32, dtype=np.int32)[None],
        "segments": np.ones((1, 32), np.int32),
    }
    scorer = losses.TokenScorer(shape, transformer.ComputeOptions(compute_dtype="bfloat16"), 16)
    gradient = jax.jit(jax.grad(lambda params: scorer(params, batch, temperature=1.0)[0].sum()))
    # Matrices are rounded before every product anyway, so the same bits are multiplied.
    for got, wanted in zip(*map(jax.tree.leaves, (gradient(jax.device_get(received)), gradient(params))), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_the_digest_is_that_of_the_bytes_and_of_the_last_version_only(publish):
    shape = _shape()
    params = transformer.init_params(shape, jax.random.key(0), "float32")
    publisher, _ = publish(shape, params, checksum=False)
    first = publisher.digest(1)
    publisher.open(2, params)
    assert publisher.digest(2) == first
    with pytest.raises(protocols.LibraError, match="version 1 has no digest: the last snapshot is of version 2"):
        publisher.digest(1)
    params["norm"]["weight"] = params["norm"]["weight"].at[0].add(1e-3)
    publisher.open(3, params)
    assert publisher.digest(3) != first


def _damaged(chunk):
    return dataclasses.replace(chunk, checksum="0" * 32)


def _with_entry(chunk, **changes):
    first, *others = chunk.entries
    return dataclasses.replace(chunk, entries=(dataclasses.replace(first, **changes), *others))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda chunks: [_damaged(chunks[0])], "chunk 0 of version 1 arrived damaged: checksum"),
        (lambda chunks: [dataclasses.replace(chunks[0], checksum=None)], "has no checksum"),
        (lambda chunks: [dataclasses.replace(chunks[0], policy_version=2)], "does not belong to the update"),
        (lambda chunks: [chunks[0], chunks[0]], "chunk 0 of version 1 does not belong to the update"),
        (lambda chunks: [chunks[0], dataclasses.replace(chunks[0], index=1)], "has received already"),
        (lambda chunks: [_with_entry(chunks[0], name="stranger")], "stranger of shape .* which this model has not"),
        (lambda chunks: [_with_entry(chunks[0], shape=(2, 2))], r"shape \(2, 2\), which this model"),
        (lambda chunks: chunks[:-1], r"version 1 is not whole: .* chunks came, without lm_head\.weight"),
        (lambda chunks: [], "version 1 is not whole: 0 of 0 chunks came"),
    ],
)
def test_what_is_not_one_whole_version_is_refused_and_the_next_is_received(publish, change, sentence):
    shape = _shape()
    params = transformer.init_params(shape, jax.random.key(0), "float32")
    _, chunks = publish(shape, params)
    made = receiver.Receiver(shape, _places(shape, "float32", _mesh(1, 1)))
    with pytest.raises(protocols.LibraError, match=sentence):
        _receive(made, change(chunks))
    received, _ = _receive(made, chunks)
    np.testing.assert_array_equal(np.asarray(received["norm"]["weight"]), np.asarray(params["norm"]["weight"]))


def test_another_version_than_the_one_begun_cannot_be_finished(publish):
    shape = _shape()
    _, chunks = publish(shape, transformer.init_params(shape, jax.random.key(0), "float32"))
    made = receiver.Receiver(shape, _places(shape, "float32", _mesh(1, 1)))
    with pytest.raises(protocols.LibraError, match="version 1 cannot be finished: the update of None was begun"):
        made.finish(1)
    made.start(1)
    for chunk in chunks:
        made.load(chunk)
    made.close()
    with pytest.raises(protocols.LibraError, match="version 1 cannot be finished"):
        made.finish(1)
