"""Flags that launchers share: one name, one meaning; and which texts hold a secret."""

from support import job_flags

import pytest
import scripts

from libra_jax.protocols import ConfigError

SHARED = {
    "slurm.py": ("plan", "workdir", "[no]dry_run", "grace", "image", "cpus_per_host", "setup", "environment"),
    "kubernetes.py": ("plan", "workdir", "[no]dry_run", "grace", "image", "cpus_per_host", "environment", "output"),
    "tpu.py": ("plan", "workdir", "[no]dry_run", "setup", "output"),
}


@pytest.mark.parametrize("script", SHARED)
def test_a_launcher_has_the_shared_flags_and_no_other_names_for_them(script):
    said = scripts.run_forked(script, "--help", "--config=configs/quickstart.py").stdout
    told = {line.split(":")[0].strip().removeprefix("--") for line in said.splitlines() if line.startswith("  --")}
    assert set(SHARED[script]) <= told
    assert not told & {"env", "container_image", "cpus", "[no]apply"}


@pytest.mark.parametrize("script", SHARED)
def test_a_launcher_without_a_config_shows_its_usage(script):
    result = scripts.run_forked(script, "--dry_run")
    scripts.assert_one_sentence(result, "error: no --config is given")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"usage: python launch/{script} --config=" in result.stderr


@pytest.mark.parametrize(
    "image",
    [
        "libra-jax",
        "registry.example/team/libra-jax:1",
        "localhost:5000/a/b_c",
        "Registry.Example/libra-jax:V1.2@sha256:" + 64 * "0",
    ],
)
def test_an_images_name_passes(image):
    job_flags.check_image(image)


@pytest.mark.parametrize(
    "image", ["", "Bad Image!", "registry.example/LIBRA", "libra-jax:", "libra-jax@sha256:12", "/a"]
)
def test_what_no_registry_would_take_for_an_image_is_refused(image):
    with pytest.raises(ConfigError, match="--image"):
        job_flags.check_image(image)


@pytest.mark.parametrize(
    "text",
    [
        "module load cuda",
        "export HF_TOKEN=$(cat ~/.token)",
        'export HF_TOKEN="$MINE"',
        "--mem=64G",
        "--export=ALL,HF_HUB_OFFLINE=0",
    ],
)
def test_a_text_without_a_value_of_a_secret_passes(text):
    job_flags.check_text("setup", text, "leave it out")


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN='correct-horse' && true",
        "--export=ALL,API_KEY=correct-horse",
        "curl -H 'X: hf_abcdefghijklmnopqrstuvwxyz'",
    ],
)
def test_a_text_with_a_secret_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match=r"--setup: .* looks like a secret, .*; leave it out") as refused:
        job_flags.check_text("setup", text, "leave it out")
    assert "correct-horse" not in str(refused.value)
    assert "hf_abc" not in str(refused.value)
