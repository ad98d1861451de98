"""What looks like a secret, and what only sounds like one."""

from support import overrides

import pytest

from libra_jax.protocols import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "anything"),
        ("WANDB_API_KEY", "anything"),
        ("AWS_SECRET_ACCESS_KEY", "anything"),
        ("tools.mcp", {"mcpServers": {"web": {"password": "anything"}}}),
        ("model.path", "hf_" + "a" * 30),
        ("ANYTHING", "ghp_" + "a1" * 18),
        ("ANYTHING", "AKIA" + "A" * 16),
        ("ANYTHING", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("PROXY", "http://me:anything@proxy:80"),
        ("ANYTHING", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4"),
    ],
)
def test_a_secret_is_refused_without_being_repeated(name, value):
    with pytest.raises(ConfigError, match=r"--flag: the value of .* looks like a secret") as refused:
        overrides.refuse_secret("--flag", name, value, "do otherwise")
    assert "anything" not in str(refused.value)
    assert str(refused.value).endswith("do otherwise")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout.max_tokens", 96),
        ("task.tokenizer", "character"),
        ("telemetry.token_env", "METRICS_TOKEN"),
        ("tools.mcp", {"mcpServers": {"web": {"headers": {"Authorization": "Bearer ${WEB_TOKEN}"}}}}),
        ("trainer.row_tokens", "512"),
        ("HF_TOKEN_PATH", "/secrets/token"),
        ("model.path", "models/Qwen3-1.7B"),
        ("PROXY", "http://proxy:80"),
        ("HF_TOKEN", ""),
        ("coordinator.group_size", 8),
    ],
)
def test_what_only_sounds_like_one_is_not(name, value):
    overrides.refuse_secret("--flag", name, value, "do otherwise")
