"""Tasks and harnesses of several kinds in one run: each task is one of the kinds that LIBRA_JAX_TEST_AGENTS names.

One run of a fake engine trains them all, because each run compiles its own programs.
"""

from __future__ import annotations

import json
import os
import random
import shlex
from pathlib import Path

from libra_jax import harness, protocols
from libra_jax.examples import calculator, planted
from libra_jax.harness import harbor, harbor_tasks
from libra_jax.rollouts import splits

AGENTS = str(Path(__file__).parents[1] / "common")
LOOP = "libra_jax.harness.openai_loop"
OUTSIDE = "libra_jax.examples.outside"

ASK = """
import json, os, urllib.request
asked = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "say much"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(asked).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
"""


def verdict(run) -> dict:
    """The last line of an agent whose model runs no commands."""
    return json.loads(run.output.splitlines()[-1])


def kinds() -> dict[str, dict]:
    """The kinds of the run, with further arguments for each."""
    return json.loads(os.environ["LIBRA_JAX_TEST_AGENTS"])


class Tasks:
    """Tasks of each kind in turn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def task(self, index: int) -> protocols.Task:
        names = list(kinds())
        kind, number = names[index % len(names)], index // len(names)
        if kind in ("loop", "agents_sdk"):
            made = calculator.task_source(seed=self._seed).task(number)
        elif kind == "mini_swe":
            made = planted.task_source(seed=self._seed, level="easy").task(number)
        elif kind == "harbor":
            made = harbor_tasks.task_source(kinds()[kind]["tasks"], self._seed, holdout=0).task(number)
        else:
            drawn = random.Random(number).randrange(1000)
            made = protocols.Task("episode", {"seed": drawn})
        return protocols.Task(f"{kind}-{number}", {**made.payload, "kind": kind})

    evaluation_task = task


def task_source(path: str = "", seed: int = 0) -> splits.Tasks:
    return Tasks(seed)  # type: ignore[return-value]


class Mixed:
    """Runs the harness of its task's kind."""

    def __init__(self, tools) -> None:
        self._tools, self._made = tools, None

    async def run(self, task: protocols.Task, endpoint: protocols.Endpoint) -> protocols.Outcome:
        kind = task.payload["kind"]
        given = dict(kinds()[kind])
        if kind == "harbor":
            given.pop("tasks")
            code = ASK + "open('answer.txt', 'w').write(said)"
            self._made = harbor.environment(command=["python3", "-S", "-c", code])
        else:
            arguments = {
                "loop": {"callable": f"{LOOP}:agent", "fields": ["*"], "status": f"{LOOP}:status"},
                "command": {
                    "command": ["python3", "-S", "-c", ASK + "print(json.dumps({'reward': len(said) / 40}))"],
                    "score": f"{__name__}:verdict",
                },
                # Killed once for each prompt, after its output.
                "dies": {
                    "command": f"python3 -S -c {shlex.quote(ASK + 'print(json.dumps(dict(reward=1 + len(said))))')} && "
                    f"if mkdir {given.pop('folder', '')}/{{prompt_id}} 2>/dev/null; then kill -9 $$; fi",
                    "score": f"{__name__}:verdict",
                },
                "agents_sdk": {
                    "callable": f"{OUTSIDE}.agents_sdk:solve",
                    "fields": ("expression", "max_characters"),
                    "score": f"{OUTSIDE}.agents_sdk:score",
                },
                "mini_swe": {"callable": f"{OUTSIDE}.mini_swe:solve", "files": "files", "score": "tests"},
                "verifiers": {
                    "callable": f"{OUTSIDE}.verifiers_v1:solve",
                    "fields": ("seed",),
                    "search": [AGENTS],
                    "arguments": {
                        "taskset": {"id": "taskset_of_sums"},
                        "tasks": 4,
                        "agent": {"harness": {"id": "null"}},
                    },
                },
                "openenv": {"callable": f"{OUTSIDE}.openenv_client:play", "fields": ("seed",)},
            }[kind]
            given = {**arguments, **given}
            self._made = harness.environment(tools=self._tools, most=2, **given)
        return await self._made.run(task, endpoint)

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()


def environment(tools) -> Mixed:
    return Mixed(tools)
