"""The health page over HTTP: what it answers, to whom, and where it listens."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import pytest
from prometheus_client import Metric, parser
from prometheus_client.openmetrics import parser as openmetrics

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.telemetry import endpoint, status

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def served(run: status.RunStatus, **telemetry: Any) -> Iterator[str]:
    page = endpoint.MetricsServer(config_lib.TelemetryConfig(**{"port": -1, **telemetry}), run)
    try:
        yield page.url
    finally:
        page.close()


def get(url: str, token: str = "", method: str = "GET", accept: str = "text/plain") -> tuple[int, str]:
    request = urllib.request.Request(url, method=method, headers={"Accept": accept})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def made(clock: Clock | None = None) -> status.RunStatus:
    run = status.RunStatus("demo", 12, 2, clock or Clock())
    run.status("trainer", "training step 4")
    run.status("rollout-0", "serving version 3")
    return run


def test_the_health_page_is_200_while_the_event_loop_answers_and_503_after():
    clock = Clock()
    run = made(clock)
    with served(run) as url:
        code, text = get(f"{url}/health")
        view = json.loads(text)
        assert (code, view["step"], view["workers"]["trainer"]["doing"]) == (200, 0, "training step 4")
        clock.now += status.SILENT_SECONDS + 1
        code, text = get(f"{url}/health")
        assert code == 503
        assert json.loads(text)["problems"] == ["The event loop has not answered for 11 s."]
        run.answered()
        assert get(f"{url}/health")[0] == 200
        run.end("failed", "A sentence.")
        assert get(f"{url}/health")[0] == 503
        assert "training step 4" in get(url)[1]
        assert get(f"{url}/secrets")[0] == 404
        assert get(f"{url}/health", method="POST")[0] == 405
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=5)


def test_prometheus_reads_scalars_workers_and_counters():
    run = made()
    run.status("rollout-0", protocols.LOST)
    run.metrics(1, {"groups/replaced_redundant": 2, "reward/mean": 0.25})
    run.metrics(
        2,
        {
            "groups/replaced_redundant": 1,
            "groups/replaced": 1,
            "policy_version": 2,
            "reward/mean": 0.5,
            "loss": float("nan"),
            "tool/look-up (other)/calls": 4,
            "agent/a-b": 1.0,
            "agent/a_b": 2.0,
        },
    )
    with served(run) as url:
        old = samples(parser.text_string_to_metric_families(get(f"{url}/metrics")[1]))
        new = samples(openmetrics.text_string_to_metric_families(get(f"{url}/metrics", accept=OPENMETRICS)[1]))
    assert old == new
    assert new == {
        ("libra_healthy",): 1.0,
        ("libra_fencing_token",): 2.0,
        ("libra_steps_total",): 2.0,
        ("libra_worker_failures_total", "rollout-0"): 1.0,
        ("libra_replaced_groups_total", "redundant"): 3.0,
        ("libra_worker_state", "trainer", "training step N"): 1.0,
        ("libra_worker_state", "lost", "rollout-0"): 1.0,
        ("libra_worker_state_seconds", "trainer"): 0.0,
        ("libra_worker_state_seconds", "rollout-0"): 0.0,
        ("libra_groups_replaced",): 1.0,
        ("libra_policy_version",): 2.0,
        ("libra_reward_mean",): 0.5,
        ("libra_tool_calls", "look-up (other)"): 4.0,
        ("libra_agent_a_b", "agent/a-b"): 1.0,
        ("libra_agent_a_b", "agent/a_b"): 2.0,
    }


def test_with_a_token_nobody_reads_anything_without_it(monkeypatch):
    monkeypatch.setenv("LIBRA_TEST_TOKEN", "correct horse")
    run = made()
    with served(run, token_env="LIBRA_TEST_TOKEN") as url:
        for path in ("", "/health", "/metrics", "/secrets"):
            for token in ("", "wrong", "correct hors", "correct horse battery"):
                code, text = get(url + path, token)
                assert code == 401
                assert "training" not in text + "correct"[8:]
        assert get(f"{url}/health", "correct horse")[0] == 200
        assert "correct horse" not in get(f"{url}/health", "correct horse")[1]


def test_it_listens_at_the_loopback_unless_told_otherwise(monkeypatch):
    with served(made()) as url:
        port = int(url.rpartition(":")[2])
        mine = [item for item in psutil.Process().net_connections() if item.status == psutil.CONN_LISTEN]
        assert [item.laddr.ip for item in mine if item.laddr.port == port] == ["127.0.0.1"]
    with pytest.raises(
        protocols.ConfigError, match=r"telemetry\.host: 0\.0\.0\.0 is reached from other hosts: name an "
    ):
        config_lib.TelemetryConfig(port=-1, host="0.0.0.0")
    with pytest.raises(protocols.ConfigError, match=r"telemetry\.host: 'localhost' is no address"):
        config_lib.TelemetryConfig(port=-1, host="localhost")
    monkeypatch.setenv("LIBRA_TEST_TOKEN", "correct horse")
    with served(made(), host="0.0.0.0", token_env="LIBRA_TEST_TOKEN") as url:
        port = url.rpartition(":")[2]
        assert get(f"http://127.0.0.1:{port}/health")[0] == 401


def test_a_port_that_is_taken_and_a_token_that_is_not_there_are_refused_with_a_sentence(monkeypatch):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(protocols.ConfigError, match=rf"telemetry\.port: {port} at 127\.0\.0\.1 cannot be had"),
            served(made(), port=port),
        ):
            pass
    monkeypatch.delenv("LIBRA_TEST_TOKEN", raising=False)
    with (
        pytest.raises(protocols.ConfigError, match=r"token_env: the environment has no LIBRA_TEST_TOKEN"),
        served(made(), token_env="LIBRA_TEST_TOKEN"),
    ):
        pass
    with pytest.raises(protocols.ConfigError, match=r"telemetry\.port: must lie in"):
        config_lib.TelemetryConfig(port=70000)


def asked(url: str, host: str | None, token: str = "") -> tuple[int, str]:
    """What a reader gets that names the page by `host`, as a browser does by the address it was given."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.putrequest("GET", "/health", skip_host=True)
    for name, value in (("Host", host), ("Authorization", f"Bearer {token}" if token else None)):
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_page_of_another_name_that_leads_here_reads_nothing(monkeypatch):
    with served(made()) as url:
        port = url.rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "10.0.0.7"):
            assert asked(url, host)[0] == 200, host
        for rebound in (f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil", "", None, "a:b:c", "[::"):
            status_code, text = asked(url, rebound)
            assert (status_code, "demo" in text) == (403, False), rebound
        assert "localhost" in text
        assert "telemetry.token_env" in text
    monkeypatch.setenv("LIBRA_TOKEN", "secret")
    with served(made(), token_env="LIBRA_TOKEN") as url:  # who has the token may call it as they like
        assert asked(url, "libra.cluster.local", token="secret")[0] == 200
        assert asked(url, "libra.cluster.local")[0] == 401


def test_of_very_many_silent_connections_the_oldest_are_closed_and_readers_served():
    with served(made()) as url, contextlib.ExitStack() as closing:
        host, port = url.removeprefix("http://").split(":")
        silent = [
            closing.enter_context(socket.create_connection((host, int(port)), timeout=5))
            for _ in range(endpoint.MOST_CONNECTIONS + 3)
        ]
        assert get(f"{url}/health")[0] == 200
        assert [connection.recv(1) for connection in silent[:3]] == [b""] * 3
        silent[-1].sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.0 200"


def test_a_request_that_comes_byte_by_byte_is_cut_off(monkeypatch):
    monkeypatch.setattr(endpoint, "IDLE_SECONDS", 0.3)
    with served(made()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            for _ in range(100):  # far beyond the limit, on a slow machine too
                try:
                    connection.sendall(b"G")
                except OSError:
                    return
                time.sleep(0.05)
    pytest.fail("a connection that never ends its request was kept")


def test_escapes_of_workers_and_notes_reach_no_reader():
    run = made()
    run.status("engine\x1b[2J", "answering \x9b31m\u202e")
    run.note("It said \x1b]0;owned\x07\nstep 9/9  reward 1.000")
    run.metrics(3, {"tool/\x1b[2J/calls": 1.0, "groups/replaced_\x1b[2J": 1.0})
    run.end("failed", "It failed: \x1b[2J")
    with served(run) as url:
        for page in ("/", "/health", "/metrics"):
            shown = get(url + page)[1]
            assert not set(shown) & set("\x1b\x9b\x07\u202e"), page
            assert "\\x1b[2J" in shown or "\\u001b[2J" in shown, page
        assert not any(line.startswith("│ step 9/9") for line in get(url + "/")[1].splitlines())
