"""A server of OpenEnv's own kind, which echoes what it hears and rewards its letters."""

import contextlib
import socket
import subprocess
import time

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Heard(text=f"ready {seed}", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        return Heard(text=action.message, done=action.message == "end", reward=0.1 * len(action.message))
    @property
    def state(self):
        return State(episode_id="e", step_count=self.steps)

uvicorn.run(create_fastapi_app(Echo, Say, Heard), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@contextlib.contextmanager
def echo(python):
    """Yields the address of a server of OpenEnv's own kind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, "-c", SERVER, str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None
            assert time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(30)
