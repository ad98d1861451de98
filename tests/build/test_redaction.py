"""Secrets among a run's settings: nothing that a run writes or prints holds one."""

import json

import pytest

from libra_jax import config as config_lib
from libra_jax.build import workdirs
from libra_jax.telemetry import escapes
from libra_jax.utils import checksums

KEY = "sk-" + "a1" * 16


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"headers": {"Authorization": "anything"}}, {"headers": {"Authorization": escapes.SECRET}}),
        (
            {"env": {"SERVICE_API_KEY": "x", "PATH": "/bin"}},
            {"env": {"SERVICE_API_KEY": escapes.SECRET, "PATH": "/bin"}},
        ),
        ({"command": ["serve", f"--key={KEY}"]}, {"command": ["serve", f"--key={escapes.SECRET}"]}),
        ({"url": "https://me:pass@host/path"}, {"url": f"https://{escapes.SECRET}@host/path"}),
        ({"note": f"uses {KEY}, really"}, {"note": f"uses {escapes.SECRET}, really"}),
        ({"key": ("x-api-key", "Bearer abcdefgh123=")}, {"key": ("x-api-key", escapes.SECRET)}),
        ({"password": ""}, {"password": ""}),
        ({"password": "${MY_PASSWORD}"}, {"password": "${MY_PASSWORD}"}),
        ({"password": "${MY_PASSWORD:-hunter2}"}, {"password": escapes.SECRET}),
    ],
)
def test_what_looks_like_a_secret_by_its_name_or_by_itself_is_left_out(values, expected):
    assert escapes.redacted(values) == expected


def test_settings_without_a_secret_stay_as_they_are():
    settings = config_lib.to_dict(
        config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(port=-1, token_env="LIBRA_TOKEN"))
    )
    assert escapes.redacted(settings) == settings


def test_a_workdir_holds_no_secret_and_another_one_is_no_other_run(tmp_path, monkeypatch):
    def with_header(secret: str) -> config_lib.RunConfig:
        server = {"url": "http://127.0.0.1:1/mcp", "headers": {"Authorization": f"Bearer {secret}"}}
        return config_lib.RunConfig(tools=config_lib.ToolsConfig(mcp={"mcpServers": {"notes": server}}))

    monkeypatch.setattr(workdirs, "_lock", lambda workdir: True)
    run = tmp_path / "run"
    workdirs.open_workdir(with_header("first-secret"), str(run))
    workdirs.open_workdir(with_header("second-secret"), str(run))
    assert not [path for path in run.rglob("*") if path.is_file() and b"-secret" in path.read_bytes()]
    stored = checksums.read_object(run / "config.json")
    stored["tools"]["mcp"]["mcpServers"]["notes"]["headers"]["Authorization"] = "Bearer of-an-older-version"
    (run / "config.json").write_text(json.dumps(stored))
    workdirs.open_workdir(with_header("third-secret"), str(run))
    assert "older-version" not in (run / "config.json").read_text()
