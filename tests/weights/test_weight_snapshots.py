"""What a publication puts into shared memory, against the parameters themselves, read in another process."""

import dataclasses
import hashlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from libra_jax import protocols
from libra_jax.models import config as models_config
from libra_jax.models import transformer
from libra_jax.models.hf import hf_names
from libra_jax.weights import memfd, snapshot

READ = """
import hashlib, json, sys
from libra_jax.weights import memfd
for line in sys.stdin:
    for name, address, offset, nbytes in json.loads(line):
        print(name, hashlib.sha256(memfd.open_peer(address)[offset : offset + nbytes]).hexdigest())
"""


def shape_of(tied: bool) -> models_config.TransformerConfig:
    tiny = models_config.load_preset("libra-tiny")
    return dataclasses.replace(tiny, num_layers=3, vocab_size=104, tie_word_embeddings=tied)


def published_digests(publisher: snapshot.HostSnapshot, version: int, count: int) -> dict[str, str]:
    """Reads every tensor in a process without JAX or torch."""
    wanted = [
        (entry.name, dict(chunk.transport), entry.offset, entry.nbytes)
        for index in range(count)
        for chunk in [publisher.stage(version, index)]
        for entry in chunk.entries
    ]
    run = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(wanted), capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in run.stdout.splitlines())


def expected_digests(shape: models_config.TransformerConfig, params: dict, dtype: str) -> dict[str, str]:
    found = {}
    for entry in hf_names.weight_map(shape):
        leaf = params
        for key in entry.path:
            leaf = leaf[key]
        array = np.asarray(leaf)
        array = array if entry.layer is None else array[entry.layer]
        wire = "float32" if array.ndim == 1 else dtype
        found[entry.hf_name] = hashlib.sha256(array.astype(jnp.dtype(wire)).tobytes()).hexdigest()
    if shape.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("tied", "param_dtype", "wire_dtype", "mesh_shape", "part_bytes"),
    [
        (True, "float32", "float32", None, None),
        (False, "float32", "bfloat16", None, 5000),
        (True, "bfloat16", "bfloat16", (1, 4, 2), None),
        (True, "bfloat16", "bfloat16", (1, 4, 2), 1000),
        (False, "float32", "float16", (2, 2, 2), 1),
    ],
)
def test_another_process_reads_every_tensor_bit_for_bit(
    tied, param_dtype, wire_dtype, mesh_shape, part_bytes, monkeypatch
):
    """Whole tensors are copied at once, or several rows in a part, the last part shorter, or a row in each."""
    if part_bytes is not None:
        monkeypatch.setattr(snapshot, "PART_BYTES", part_bytes)
    shape = shape_of(tied)
    params = transformer.init_params(shape, jax.random.key(0), param_dtype)
    if mesh_shape is not None:
        mesh = jax.make_mesh((*mesh_shape, 1), ("data", "fsdp", "tensor", "context"))
        params = jax.device_put(params, transformer.shardings(shape, mesh))
        widths = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)}
        assert widths == {8}
    publisher = snapshot.HostSnapshot(shape, wire_dtype, 100_000, False)
    count = publisher.open(4, params)
    assert count > 2
    assert published_digests(publisher, 4, count) == expected_digests(shape, params, wire_dtype)
    publisher.shutdown()


def test_the_next_snapshot_reuses_the_memory_and_replaces_the_content():
    shape = shape_of(False)
    publisher = snapshot.HostSnapshot(shape, "float32", 1 << 30, True)
    first, second = (transformer.init_params(shape, jax.random.key(seed)) for seed in (1, 2))
    publisher.open(1, first)
    before = publisher.stage(1, 0)
    publisher.close(1)
    publisher.open(2, second)
    after = publisher.stage(2, 0)
    assert before.transport == after.transport
    assert before.checksum != after.checksum
    mapping = memfd.open_peer(after.transport)
    assert memfd.digest(memoryview(mapping)[: after.nbytes]) == after.checksum
    publisher.shutdown()
    publisher.shutdown()


def test_parameters_may_be_donated_while_their_snapshot_is_open():
    shape = shape_of(True)
    params = transformer.init_params(shape, jax.random.key(0))
    publisher = snapshot.HostSnapshot(shape, "float32", 1 << 30, True)
    publisher.open(1, params)
    published = publisher.stage(1, 0).checksum
    leaves = jax.tree.leaves(params)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    updated = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updated)} == pointers
    assert publisher.stage(1, 0).checksum == published
    with pytest.raises(protocols.LibraError, match="was donated before"):
        publisher.open(2, params)
    publisher.shutdown()


def test_a_parameter_that_is_missing_or_misshapen_is_named():
    shape = shape_of(True)
    params = transformer.init_params(shape, jax.random.key(0))
    publisher = snapshot.HostSnapshot(shape, "float32", 1 << 30, False)
    with pytest.raises(protocols.LibraError, match=r"model\.norm\.weight cannot be synced: .* has shape None"):
        publisher.open(1, {key: value for key, value in params.items() if key != "norm"})
    with pytest.raises(protocols.LibraError, match=r"norm/weight has shape \(7,\), not \(128,\)"):
        publisher.open(1, {**params, "norm": {"weight": jnp.zeros(7)}})


def test_a_chunk_of_a_version_that_is_not_open_is_refused():
    shape = shape_of(True)
    publisher = snapshot.HostSnapshot(shape, "float32", 1 << 30, False)
    publisher.open(3, transformer.init_params(shape, jax.random.key(0)))
    with pytest.raises(protocols.LibraError, match="chunk 0 of version 2 cannot be staged: version 3 is open"):
        publisher.stage(2, 0)
    publisher.close(3)
    with pytest.raises(protocols.LibraError, match="version None is open"):
        publisher.stage(3, 0)
    publisher.shutdown()


def test_too_little_memory_for_the_snapshot_is_said_before_any_is_taken(monkeypatch):
    shape = shape_of(True)
    publisher = snapshot.HostSnapshot(shape, "float32", 100_000, False)
    monkeypatch.setattr(memfd, "available_bytes", lambda: 1000)
    with pytest.raises(memfd.SharedMemoryError, match=r"snapshot of the weights .* only 0\.0 MiB"):
        publisher.open(1, transformer.init_params(shape, jax.random.key(0)))


def test_a_single_device_array_is_shared_and_not_copied():
    array = jnp.arange(1000.0)
    tensor = snapshot.to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    pointer = tensor.data_ptr()
    del array
    assert tensor.data_ptr() == pointer
    assert tensor[-1] == 999
