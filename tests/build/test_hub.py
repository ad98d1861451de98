"""Models and datasets named by Hugging Face id: from the cache, else from the hub, else a sentence."""

import json
import pathlib
import threading
import time
import types

from support import job_flags

import huggingface_hub
import pytest
import scripts
from huggingface_hub import constants

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import planned
from libra_jax.models.hf import hub
from libra_jax.simulator import scripts as rollouts
from libra_jax.utils import tables

SHAPE = (scripts.ROOT / "libra_jax/models/presets/libra-tiny.json").read_text()
WHOLE = {"config.json": SHAPE, "model.safetensors": "", "tokenizer.json": "{}"}
LINE = '{"prompt": "1+1", "answer": "2"}\n'


def snapshot(cache: pathlib.Path, kind: str, name: str, files: dict[str, str], sha: str = "0123456789abcdef") -> str:
    """A snapshot of the cache as the hub's client lays it out; its folder."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(sha)
    folder = repository / "snapshots" / sha
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return str(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def online(cache, monkeypatch):
    """A hub with one model of two files; what is fetched from it is noted."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    sizes = {"config.json": 1_000, "model.safetensors": 2_000_000, "pytorch_model.bin": 9_000_000}
    siblings = [types.SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    monkeypatch.setattr(
        huggingface_hub.HfApi, "repo_info", lambda self, name, **_: types.SimpleNamespace(siblings=siblings)
    )
    fetched: list[list[str]] = []

    def download(name, allow_patterns, local_files_only=False, **_):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        fetched.append(allow_patterns)
        return str(cache / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fetched


def run_of(model: str = "", tokenizer: str = "character", tasks: str = "", **arguments) -> config_lib.RunConfig:
    task = config_lib.TaskConfig(path=tasks, tokenizer=tokenizer, arguments=arguments)
    return config_lib.RunConfig(model=config_lib.ModelConfig(path=model), task=task)


def test_cached_snapshots_stand_for_ids_without_a_network(cache):
    model = snapshot(cache, "model", "acme/tiny", WHOLE)
    data = snapshot(cache, "dataset", "acme/sums", {"data/train-00000-of-00001.parquet": "", "README.md": ""})
    found = hub.resolved(run_of("acme/tiny", "acme/tiny@main", "acme/sums"), download=True)
    assert found.problems == ()
    assert (found.config.model.path, found.config.task.tokenizer, found.config.task.path) == (model, model, data)
    assert found.notes[0] == "model acme/tiny: snapshot 01234567 of the Hugging Face cache"
    assert found.fields == {"model.path", "task.tokenizer", "task.path"}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": SHAPE},
        {"model.safetensors": ""},
        {**WHOLE, "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}})},
    ],
    ids=["absent", "no_weights", "no_config", "a_shard_lacks"],
)
def test_an_id_that_the_cache_lacks_is_told_offline(cache, files):
    if files:
        snapshot(cache, "model", "acme/tiny", files)
    found = hub.resolved(run_of("acme/tiny"), download=True)
    assert found.config.model.path == "acme/tiny"
    (problem,) = found.problems
    assert problem.startswith(
        "config.model.path: acme/tiny is no folder here; as a Hugging Face id it needs the network"
    )
    assert "HF_HUB_OFFLINE is set" in problem


def test_a_dataset_of_several_configurations_asks_for_one(cache):
    folder = snapshot(
        cache, "dataset", "acme/gsm", {"main/train-00000-of-00001.parquet": "", "socratic/train.parquet": ""}
    )
    (problem,) = hub.resolved(run_of(tasks="acme/gsm"), download=True).problems
    assert "has several configurations: main, socratic; give one, such as acme/gsm/main" in problem
    assert hub.resolved(run_of(tasks="acme/gsm/main"), download=True).config.task.path == f"{folder}/main"


def test_a_dataset_of_json_lines_gives_the_file_of_its_split(cache):
    folder = snapshot(cache, "dataset", "acme/lines", {"train.jsonl": LINE, "test.jsonl": LINE * 2})
    found = hub.resolved(run_of(tasks="acme/lines", split="test"), download=True)
    assert found.config.task.path == f"{folder}/test.jsonl"
    assert len(list(tables.rows(found.config.task.path))) == 2


def test_a_dataset_with_a_shard_missing_is_not_whole(cache):
    snapshot(cache, "dataset", "acme/part", {"data/train-00000-of-00002.parquet": ""})
    assert len(hub.resolved(run_of(tasks="acme/part"), download=True).problems) == 1


@pytest.mark.parametrize(
    "text",
    ["", "character", "/models/x", "./acme/tiny", "~/acme/tiny", "data/tasks.jsonl", "models/mine", "acme/x/y/z"],
)
def test_what_can_be_a_path_is_no_id(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert hub.parse(text, "model") is None


def test_a_dry_run_fetches_no_weights_and_a_run_fetches_them(online, capsys):
    found = hub.resolved(run_of("acme/tiny"), download=False)
    assert found.problems == ()
    assert "2 files, 1.91 MiB from the Hugging Face hub, which a run will fetch" in found.notes[0]
    assert "*.safetensors" not in online.pop()
    found = hub.resolved(run_of("acme/tiny"), download=True)
    assert "*.safetensors" in online.pop()
    assert capsys.readouterr().out == "Fetching model acme/tiny: 2 files, 1.91 MiB from the Hugging Face hub ...\n"


def test_a_hub_that_does_not_answer_is_given_up_in_a_sentence(online, monkeypatch):
    monkeypatch.setattr(hub, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda self, name, **_: time.sleep(5))
    (problem,) = hub.resolved(run_of("acme/tiny"), download=True).problems
    assert "the Hugging Face hub cannot be asked (TimeoutError: no answer within 0.05 s); without a network" in problem


def test_a_download_that_takes_long_says_so(online, monkeypatch):
    monkeypatch.setattr(hub, "WATCH_SECONDS", 0.001)
    told = threading.Event()

    def download(name, local_files_only=False, **_):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        told.wait(10)
        return "fetched"

    def tell(*arguments, **_):
        said.append(arguments[0])
        told.set()

    said: list[str] = []
    monkeypatch.setattr(hub, "print", tell, raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolved(run_of("acme/tiny"), download=False).config.model.path == "fetched"
    assert said[0].startswith("Still fetching model acme/tiny from the Hugging Face hub after 0 s; ")


def test_a_name_that_the_hub_does_not_have_is_told(online, monkeypatch):
    def refuse(self, name, **_):
        raise huggingface_hub.errors.HFValidationError("no such name")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    (problem,) = hub.resolved(run_of("acme/tinny"), download=True).problems
    assert "acme/tinny is no folder here, and the Hugging Face hub shows nothing of that name" in problem


def test_a_launcher_checks_the_shape_of_an_id(cache, capsys):
    job_flags.Run(run_of("acme/short"), ()).validate()
    assert "note: config.model.path: acme/short is no folder here; " in capsys.readouterr().err
    short = {**json.loads(SHAPE), "max_position_embeddings": 64}
    snapshot(cache, "model", "acme/short", {"config.json": json.dumps(short)})  # a login node needs no weights
    with pytest.raises(protocols.ConfigError, match="exceeds the model's 64 positions"):
        job_flags.Run(run_of("acme/short"), ()).validate()  # a command reads the shape once


def test_a_plan_is_for_the_model_of_the_config_or_for_none(cache):
    asked = planned.PlanRequest(lengths=rollouts.RequestedLengths(rollouts.LogNormal.fitted(100, 200)))
    for path in ("acme/tiny", str(cache / "none")):
        values = config_lib.to_dict(run_of(path))
        with pytest.raises(protocols.DataError, match=rf"^config\.model\.path: .*{path}.* with --model$"):
            planned.case(values, asked)
    wide = {**json.loads(SHAPE), "vocab_size": 50_000}
    snapshot(cache, "model", "acme/tiny", {"config.json": json.dumps(wide)})
    case = planned.case(config_lib.to_dict(run_of("acme/tiny")), asked)
    assert (case.name, case.model.shape.vocab_size) == ("tiny", 50_000)


def test_a_run_reads_the_snapshot_and_its_workdir_keeps_the_id(cache, tmp_path):
    snapshot(cache, "model", "acme/tiny", WHOLE)
    lines = "".join(json.dumps({"prompt": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(9))
    snapshot(cache, "dataset", "acme/sums", {"train.jsonl": lines})
    ids = ("--config=configs/questions.py", "--config.model.path=acme/tiny", "--config.task.path=acme/sums")
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    dry = scripts.run("train.py", *ids, "--dry_run", environment=environment)
    assert dry.returncode == 0, dry.stderr
    assert "8 to train on, 1 held out; the first: " in dry.stdout
    assert "--config.model.path='acme/tiny'\n" in dry.stdout, "the config is shown as it was given"
    assert "dataset acme/sums: snapshot 01234567 of the Hugging Face cache" in dry.stdout
    stored = json.loads(json.dumps(config_lib.to_dict(config_lib.RunConfig()), default=list))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(stored))
    result = scripts.run("train.py", *ids, f"--workdir={tmp_path / 'run'}", environment=environment)
    scripts.assert_one_sentence(result, "config.model.path is '' there and 'acme/tiny' here", "'acme/sums' here")
    assert "Model acme/tiny: snapshot 01234567 of the Hugging Face cache." in result.stdout
