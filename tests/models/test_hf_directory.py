"""Import and export: bit-exact whatever the sharding, and a sentence for every way a directory can be broken."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers
from jax.sharding import AxisType

from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.hf import hf, hf_names
from libra_jax.protocols import DataError

AXES = ("data", "fsdp", "tensor", "context")
FIRST = "model.layers.0.self_attn.q_proj.weight"


def _mesh(*shape):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


@pytest.fixture(scope="module")
def config():
    return model_config.untied(model_config.load_preset("libra-tiny"))


@pytest.fixture(scope="module")
def params(config):
    return jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(1))


@pytest.fixture
def directory(config, params, tmp_path):
    hf.save(params, config, tmp_path / "model")
    return tmp_path / "model"


def _same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000, 1])
def test_round_trip_is_bit_exact(config, params, dtype, shard_bytes, tmp_path):
    stored = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    hf.save(stored, config, tmp_path / "model", max_shard_bytes=shard_bytes)
    files = list((tmp_path / "model").glob("*.safetensors"))
    tensors = len(hf_names.weight_map(config))
    expected = {1 << 30: range(1, 2), 100_000: range(2, tensors), 1: range(tensors, tensors + 1)}
    assert len(files) in expected[shard_bytes]
    _same(hf.load(tmp_path / "model", model_config.read_directory(tmp_path / "model"), dtype), stored)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no temporary directory is left


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (2, 2, 2, 1), (4, 1, 2, 1)])
def test_sharded_round_trip_is_bit_exact(config, params, directory, shape, tmp_path):
    shardings = transformer.shardings(config, _mesh(*shape))
    loaded = hf.load(directory, config, shardings=shardings)
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf, where: leaf.sharding == where, loaded, shardings)))
    _same(loaded, params)
    hf.save(loaded, config, tmp_path / "again", max_shard_bytes=100_000)
    _same(hf.load(tmp_path / "again", config), params)


def test_sharded_load_reads_only_each_device_piece(config, directory, monkeypatch):
    read = []
    real = hf.safetensors.safe_open

    class Recording:
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def __enter__(self):
            self.handle = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.handle.keys()

        def metadata(self):
            return self.handle.metadata()

        def get_slice(self, name):
            piece = self.handle.get_slice(name)
            recorder = self

            class Slice:
                def get_shape(self):
                    return piece.get_shape()

                def __getitem__(self, index):
                    array = piece[index]
                    read.append((name, array.size))
                    return array

            assert recorder
            return Slice()

    monkeypatch.setattr(hf.safetensors, "safe_open", Recording)
    hf.load(directory, config, shardings=transformer.shardings(config, _mesh(2, 2, 2, 1)))
    shapes = {entry.hf_name: entry.shape for entry in hf_names.weight_map(config)}
    for name, size in read:
        whole = int(np.prod(shapes[name]))
        assert size == (whole if len(shapes[name]) == 1 else whole // 4), name
    assert sum(size for _, size in read) == model_config.parameter_count(config)  # replicas share one reading


def test_weights_are_converted_to_the_dtype_asked_for(config, params, directory):
    loaded = hf.load(directory, config, "bfloat16")
    _same(loaded, jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), params))


def test_equal_weights_and_metadata_give_equal_files(tmp_path):
    written = set()
    for _ in range(12):  # the order of a hash map differs from call to call
        hf.save_file({"a": np.arange(3.0)}, tmp_path / "a.safetensors", hf.METADATA)
        written.add((tmp_path / "a.safetensors").read_bytes())
    assert len(written) == 1
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as handle:
        assert handle.metadata() == hf.METADATA
        np.testing.assert_array_equal(handle.get_tensor("a"), np.arange(3.0))


def test_export_replaces_a_model_and_nothing_else(config, params, directory, tmp_path):
    (directory / "stale.safetensors").write_bytes(b"")
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    hf.save(doubled, config, directory)
    _same(hf.load(directory, config), doubled)
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with pytest.raises(DataError, match="exists and holds no model"):
        hf.save(params, config, tmp_path / "letters")
    assert (tmp_path / "letters" / "dear.txt").read_text() == "dear"


def test_a_failed_export_leaves_the_old_model_whole(config, params, directory, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.safetensors.numpy, "save_file", full)
    with pytest.raises(DataError, match=r"could not be written .*No space left"):
        hf.save(jax.tree.map(lambda leaf: 2 * leaf, params), config, directory)
    _same(hf.load(directory, config), params)
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def _rewrite(directory, change):
    file = directory / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(file))
    change(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def test_known_extras_are_ignored(config, params, directory):
    _rewrite(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    _same(hf.load(directory, config), params)
    tied = model_config.load_preset("libra-tiny")
    _rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    loaded = hf.load(directory, tied)  # lm_head.weight is in the file, and the model does not need it
    assert "lm_head" not in loaded
    np.testing.assert_array_equal(loaded["embed_tokens"]["weight"], params["embed_tokens"]["weight"])


@pytest.mark.parametrize(
    "change", [lambda head: head + np.eye(*head.shape, k=-100, dtype=head.dtype), lambda head: head[:-1]]
)
def test_a_tied_model_with_another_head_is_refused(change, config, directory):
    _rewrite(directory, lambda t: t.update({"lm_head.weight": change(t["model.embed_tokens.weight"])}))
    with pytest.raises(
        DataError, match=r"model\.safetensors: lm_head\.weight differs .* tie_word_embeddings; set that"
    ):
        hf.load(directory, dataclasses.replace(config, tie_word_embeddings=True))


def test_the_single_file_is_read_beside_a_stale_index_as_transformers_does(config, params, tmp_path):
    hf.save(jax.tree.map(lambda leaf: 2 * leaf, params), config, tmp_path / "old", max_shard_bytes=500_000)
    hf.save(params, config, tmp_path / "model")
    for file in (tmp_path / "old").glob("model*"):
        shutil.copy(file, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = hf.load(tmp_path / "model", config)
    np.testing.assert_array_equal(loaded["norm"]["weight"], theirs.model.norm.weight.detach())
    _same(loaded, params)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(FIRST), f"no file holds the tensor {FIRST}"),
        (
            lambda t: t.update({FIRST: t[FIRST][:-1]}),
            f"tensor {FIRST} has shape (127, 128), but config.json implies (128, 128)",
        ),
        (lambda t: t.update({"model.layers.9.mlp.bias": t[FIRST]}), "tensor model.layers.9.mlp.bias has no place"),
    ],
)
def test_wrong_tensors_are_sentences(config, directory, change, sentence):
    _rewrite(directory, change)
    with pytest.raises(DataError) as caught:
        hf.load(directory, config)
    assert sentence in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_file_is_a_sentence(config, directory, kept):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(len(data) * kept)])
    with pytest.raises(DataError, match=r"model\.safetensors: is not a whole safetensors file"):
        hf.load(directory, config)


def test_missing_files_are_sentences(config, params, tmp_path):
    def message():
        with pytest.raises(DataError) as caught:
            hf.load(tmp_path / "model", config)
        return str(caught.value)

    assert "no such model directory" in message()
    hf.save(params, config, tmp_path / "model", max_shard_bytes=500_000)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert f"{shards[1].name}: missing" in message()
    index = tmp_path / "model" / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text[: len(text) // 2])
    assert "is not a whole index" in message()
    index.write_text(json.dumps({"metadata": {}}))
    assert "is not a whole index" in message()
    index.unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message()
    shutil.rmtree(tmp_path / "model")
