"""Servers of this machine are asked without a proxy by the clients of each library that the package uses."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

ASK = """
import json, sys, urllib.request
import libra_jax
from libra_jax.chat import endpoints
import asyncio, httpx, requests

async def first(client):
    page = await client.models.list()
    return 200 if page.data == [] else 0

port, found = sys.argv[1], {}
for host in ("127.0.0.1", "localhost"):
    url = f"http://{host}:{port}/v1/models"
    found[f"urllib {host}"] = urllib.request.urlopen(url, timeout=5).status
    found[f"requests {host}"] = requests.get(url, timeout=5).status_code
    found[f"httpx {host}"] = httpx.get(url, timeout=5).status_code
    made = endpoints.create(f"http://{host}:{port}/v1", api_key_env="", seconds=5, retries=0, field_name="judge")
    found[f"openai {host}"] = asyncio.run(first(made.client))
found["bypassed"] = [h for h in ("internal.example", "::1", "example.org") if urllib.request.proxy_bypass(h)]
print(json.dumps(found))
"""


class Models(http.server.BaseHTTPRequestHandler):
    """Answers every question with an empty list of models."""

    def do_GET(self):
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variables", "bypassed"),
    [
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, ["::1"]),
        ({"http_proxy": "http://127.0.0.1:9", "no_proxy": "internal.example"}, ["internal.example", "::1"]),
        ({"ALL_PROXY": "http://127.0.0.1:9", "NO_PROXY": "internal.example,::1"}, ["internal.example", "::1"]),
        ({"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "*"}, ["internal.example", "::1", "example.org"]),
    ],
)
def test_the_loopback_is_never_asked_through_a_proxy(variables, bypassed, port):
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    asked = [sys.executable, "-c", ASK, str(port)]
    ended = subprocess.run(asked, env=kept | variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("bypassed") == bypassed
    assert set(found.values()) == {200}
