"""Serves the health page and Prometheus metrics over HTTP, from the coordinator's process.

    /         the screen of launch/status.py, as text
    /health   200 while the event loop answers and no wait is past its deadline, else 503; JSON, as in `status.json`
    /metrics  the scalars of `metrics.jsonl` of the last step as gauges, workers and what they do, counters

The Prometheus client's threaded WSGI server answers even if the event loop does not. Its `start_wsgi_server` is not
used: it keeps a thread forever for every silent connection, before a token could be asked for. 300 connections took 300
threads; here they take 32, for 10 s.

The page listens on the loopback address unless `telemetry.host` names another, and then requires a token. The token is
sent unencrypted. If not all hosts on the network are trusted, put a TLS proxy in front. Without a token, the page
answers only requests addressed to an IP address or to localhost. So a website whose name is pointed here (DNS
rebinding) reads nothing.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import ipaddress
import json
import os
import re
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from wsgiref import simple_server

import prometheus_client
from prometheus_client import core, exposition, registry

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.telemetry import escapes, screen, status

IDLE_SECONDS = 10.0
"""Seconds that a reader has to send its whole request and to take the answer."""

MOST_CONNECTIONS = 32
"""Largest number of open connections. One more closes the oldest, so that silent connections keep no reader out."""

_TOOL = re.compile(r"tool/(?P<tool>.+)/(?P<what>\w+)")
_Answer = tuple[str, str, bytes]


@dataclass(eq=False)  # a registry keeps it in a dict, which needs a hash
class Collector(registry.Collector):
    """Makes Prometheus metrics from a run's current view at each request. Keeps no earlier values."""

    run: status.RunStatus

    def collect(self) -> Iterator[core.Metric]:
        view = self.run.view()
        yield core.GaugeMetricFamily("libra_healthy", "1 while /health answers 200.", float(_is_well(view)))
        yield core.GaugeMetricFamily("libra_fencing_token", "Starts of this run in its workdir.", view["fencing_token"])
        yield core.CounterMetricFamily("libra_steps", "Training steps taken, earlier starts' included.", view["step"])
        failures = core.CounterMetricFamily("libra_worker_failures", "Times that a worker was lost.", labels=["worker"])
        replaced = core.CounterMetricFamily(
            "libra_replaced_groups", "Groups replaced by this start.", labels=["reason"]
        )
        doing = core.GaugeMetricFamily("libra_worker_state", "1: what the worker does.", labels=["worker", "state"])
        seconds = core.GaugeMetricFamily("libra_worker_state_seconds", "Since when.", labels=["worker"])
        for worker, count in view["failures"].items():
            failures.add_metric([escapes.visible(worker)], count)
        for reason, count in view["replaced"].items():
            replaced.add_metric([escapes.visible(reason)], count)
        for name, worker in view["workers"].items():
            # Digits become N, because each number would start a new time series.
            state = escapes.visible(re.sub(r"\d+", "N", worker["doing"]))
            doing.add_metric([escapes.visible(name), state], 1.0)
            seconds.add_metric([escapes.visible(name)], worker["seconds"])
        yield from (failures, replaced, doing, seconds)
        # `reward/mean` becomes libra_reward_mean, and `tool/calculator/calls` libra_tool_calls{tool="calculator"}.
        named: dict[str, dict[str, float]] = collections.defaultdict(dict)
        tools: dict[str, dict[str, float]] = collections.defaultdict(dict)
        for name, value in view["scalars"].items():
            if value is None:
                continue
            if match := _TOOL.fullmatch(name):
                tools[f"libra_tool_{match['what']}"][match["tool"]] = value
            elif not name.startswith(status.REPLACED):  # these are counters, above
                named["libra_" + re.sub(r"\W", "_", name, flags=re.ASCII)][name] = value
        for label, families in (("tool", tools), ("name", named)):
            for family, values in families.items():
                first, *other_names = values
                if label == "name" and not other_names:
                    yield core.GaugeMetricFamily(family, f"{escapes.visible(first)} of the last step.", values[first])
                    continue
                # If two names become the same, each keeps its own name in a label: Prometheus refuses a family twice.
                gauge = core.GaugeMetricFamily(family, "Of the last step.", labels=[label])
                for called, value in values.items():
                    gauge.add_metric([escapes.visible(called)], value)
                yield gauge


class MetricsServer:
    """The HTTP server.

    Args:
      config: The `telemetry` settings, with a port.

    Attributes:
      url: Address of the page.

    Raises:
      ConfigError: The port is in use, the address is not this host's, or the environment holds no token.
    """

    def __init__(self, config: config_lib.TelemetryConfig, run: status.RunStatus) -> None:
        self._run = run
        token = os.environ.get(config.token_env, "").strip() if config.token_env else ""
        if config.token_env and not token:
            raise protocols.ConfigError(
                f"config.telemetry.token_env: the environment has no {config.token_env}, or an empty one; set it to a "
                "secret, e.g. by `openssl rand -hex 32`"
            )
        self._token = token.encode()  # empty if readers need none
        # Not the global registry: it would add metrics of the Python process, and refuse a second run's.
        metrics = registry.CollectorRegistry()
        metrics.register(Collector(run))
        self._metrics = prometheus_client.make_wsgi_app(metrics)
        host = ipaddress.ip_address(config.host)
        # The address family is a class attribute of socketserver, so each family needs its own subclass.
        kind = type("_Family", (_Server,), {"address_family": socket.AF_INET6 if host.version == 6 else socket.AF_INET})
        try:
            # The config writes -1 for any free port, and a socket 0.
            self._server: _Server = kind((config.host, max(0, config.port)), _Quiet)
        except OSError as error:
            raise protocols.ConfigError(
                f"config.telemetry.port: {config.port} at {config.host} cannot be had ({error.strerror or error}); "
                "choose another, or -1 for any that is free"
            ) from error
        self._server.set_app(self._answer)
        url_host = f"[{config.host}]" if host.version == 6 else config.host
        self.url = f"http://{url_host}:{self._server.server_port}"
        # A daemon, so that a run that fails before `close` still ends.
        self._thread = threading.Thread(target=self._server.serve_forever, name="libra-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the port and ends the server's thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not self._token and not _is_address(environ.get("HTTP_HOST", "")):
            text = b"Read this page as localhost or by an address; under other names it needs telemetry.token_env.\n"
            return _sent(start_response, ("403 Forbidden", "text/plain", text))
        authorization = environ.get("HTTP_AUTHORIZATION", "").encode()
        # Compares in constant time, so that the time of an answer tells nothing about the token.
        if self._token and not hmac.compare_digest(authorization, b"Bearer " + self._token):
            text = b"This page needs the run's token: send the header Authorization: Bearer <token>.\n"
            return _sent(start_response, ("401 Unauthorized", "text/plain", text))
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _sent(start_response, ("405 Method Not Allowed", "text/plain", b"There is only GET here.\n"))
        match environ["PATH_INFO"]:
            case "/metrics":
                return self._metrics(environ, start_response)
            case "/":
                page = screen.text(self._run.view()).encode()
                return _sent(start_response, ("200 OK", "text/plain; charset=utf-8", page))
            case "/health":
                view = self._run.view()
                line = "200 OK" if _is_well(view) else "503 Service Unavailable"
                return _sent(start_response, (line, "application/json", json.dumps(view, indent=1).encode()))
        return _sent(start_response, ("404 Not Found", "text/plain", b"There are /, /health and /metrics.\n"))


def _is_well(view: Mapping[str, Any]) -> bool:
    return not view["problems"] and (view["ended"] or {}).get("how") != "failed"


def _is_address(host: str) -> bool:
    """Returns whether a request's Host is localhost or an IP address. No name server decides where these lead."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _sent(start_response: Callable[..., Any], answer: _Answer) -> Iterable[bytes]:
    line, kind, body = answer
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
    # Text that contains a model's HTML must not be rendered as HTML.
    headers.append(("X-Content-Type-Options", "nosniff"))
    if line.startswith("401"):
        headers.append(("WWW-Authenticate", "Bearer"))
    start_response(line, headers)
    return [body]


class _Server(exposition.ThreadingWSGIServer):
    # With a shorter queue, a burst of connections waits seconds for the kernel's retries.
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread."""
        with self._lock:
            self._deadlines[request] = time.monotonic() + IDLE_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections at their deadlines, and the oldest if there are too many. Runs after each request, too."""
        with self._lock:
            surplus = len(self._deadlines) - MOST_CONNECTIONS
            for place, (connection, deadline) in enumerate(list(self._deadlines.items())):
                # Of the whole request: the standard library's limit restarts with each byte.
                if place < surplus or deadline < time.monotonic():
                    del self._deadlines[connection]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)  # its thread sees the end of the stream and closes it

    def shutdown_request(self, request: Any) -> None:
        """Forgets the connection and closes it."""
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Binds without looking up the host's name. The standard library looks it up, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing, because a reader that goes away is not an error."""


class _Quiet(simple_server.WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Prints nothing, because requests do not belong on the run's console."""
