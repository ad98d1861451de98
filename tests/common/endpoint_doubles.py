"""A server on this machine with OpenAI's API, whose answers a test writes."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time


class Endpoint(http.server.ThreadingHTTPServer):
    """Answers each request with what `reply` says, and keeps what was asked.

    `open` requests are under way now, and `most` were at once.
    """

    daemon_threads = True

    def __init__(self):
        self.asked, self.keys, self.open, self.most = [], [], 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def reply(self, path, body):
        """Returns status, JSON and seconds of the answer. Called with the lock held."""
        raise NotImplementedError


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with self.server.lock:
            status, said, _ = self.server.reply(self.path, None)
        self._send(status, said)

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.open += 1
            server.most = max(server.most, server.open)
            server.asked.append(body)
            server.keys.append(self.headers["Authorization"])
            status, said, seconds = server.reply(self.path, body)
        time.sleep(seconds)
        with server.lock:
            server.open -= 1
        self._send(status, said)

    def _send(self, status, said):
        if status != 200:
            said = {"error": {"message": f"{said}; you sent {self.headers['Authorization']}"}}
        data = json.dumps(said).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After-Ms", "10")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # who asked has given up
            self.close_connection = True

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving():
    """Yields a function that starts endpoints, and ends them."""
    servers = []

    def start(server):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    try:
        yield start
    finally:
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join(10)
            assert not thread.is_alive()
