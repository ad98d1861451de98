"""Whatever user code raises counts as any other error of it; only the run itself cancels or ends."""

import asyncio
import types

import loop_doubles as doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rewards import actors
from libra_jax.rollouts import tool_results
from libra_jax.tools import toolbox, toolkit
from libra_jax.utils import deadlines, resolving, user_code


class Own(BaseException):
    """As pytest.fail and panics of Rust extensions raise it."""


def exits(code):
    def body(*_):
        raise SystemExit(code)

    return body


def raises(error):
    def body(*_):
        raise error

    return body


def in_async(body):
    async def awaited(*arguments):
        await asyncio.sleep(0)
        return body(*arguments)

    return awaited


async def cancels_a_task_of_its_own(*_):
    task = asyncio.ensure_future(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def cancels_itself(*_):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


PLAIN = {
    "SystemExit: 0": exits(0),
    "SystemExit: 3": exits(3),
    "Own: x": raises(Own("x")),
    "CancelledError": raises(asyncio.CancelledError()),
    "ValueError: x": raises(ValueError("x")),
}
ON_THREADS = {**PLAIN, "KeyboardInterrupt": raises(KeyboardInterrupt()), "GeneratorExit": raises(GeneratorExit())}
ASYNC = {name: in_async(body) for name, body in [*PLAIN.items(), ("GeneratorExit", raises(GeneratorExit()))]}
CANCELLING = {"await": cancels_a_task_of_its_own, "self": cancels_itself}
BOTH = [
    *(pytest.param(body, name, id=f"plain {name}") for name, body in ON_THREADS.items()),
    *(pytest.param(body, name, id=f"async {name}") for name, body in ASYNC.items()),
    *(pytest.param(body, "CancelledError", id=f"cancels {name}") for name, body in CANCELLING.items()),
]


def within_seconds(work):
    """The result of work that may hang where it fails."""

    async def bounded():
        return await asyncio.wait_for(work, 10)

    return asyncio.run(bounded())


class Tool:
    name, description, parameters = "tool", "Fails.", {"type": "object"}

    def __init__(self, body):
        self.call = body


@pytest.mark.parametrize(
    ("body", "name"),
    [*((body, name) for name, body in ASYNC.items()), (cancels_a_task_of_its_own, "CancelledError")],
)
def test_what_a_tool_raises_is_a_failure_that_the_policy_reads(body, name):
    box = toolbox.Toolbox([Tool(body)])
    answer = within_seconds(box.call("tool", {}))
    assert (answer.tool, answer.status, box._counts["raised_calls"]) == ("tool", "failure", 1)
    assert answer.content.startswith(f"error: {name}")


@pytest.mark.parametrize("verb", ["reset", "step", "ready", "snapshot"])
@pytest.mark.parametrize(("body", "name"), BOTH)
def test_what_an_environment_raises_is_a_crash(verb, body, name):
    async def step(output):
        return protocols.StepResult(messages=[protocols.Message("user", "more")])

    environment = doubles.Probe(step)
    setattr(environment, verb, body)
    work = doubles.run(sampler=doubles.ScriptedSampler(["a", "b"]), environment=environment)
    with pytest.raises(protocols.EnvironmentCrashed, match=f"Probe, task t: {verb} raised {name}"):
        within_seconds(work)
    assert environment.closed == 1


@pytest.mark.parametrize(("body", "name"), BOTH)
def test_a_close_that_raises_is_counted(body, name):
    async def step(output):
        return protocols.StepResult(done=True, reward=1.0)

    environment = doubles.Probe(step)
    environment.close = body
    trajectory = within_seconds(doubles.run(sampler=doubles.ScriptedSampler(["a"]), environment=environment))
    assert (trajectory.reward, trajectory.metrics["close_failures"]) == (1.0, 1.0)


@pytest.mark.parametrize(("name", "body"), PLAIN.items())
def test_what_a_listener_raises_is_a_crash(name, body):
    environment = doubles.Probe()
    environment.hear = body
    with pytest.raises(protocols.EnvironmentCrashed, match=f"hear raised {name}"):
        within_seconds(doubles.run(sampler=doubles.ScriptedSampler(["a"]), environment=environment))


@pytest.mark.parametrize(("body", "name"), BOTH)
def test_what_a_reward_function_raises_is_its_problem(body, name):
    given = resolving.give(lambda: body, "reward.functions", name=f"own-{id(body)}", text=str(id(body)))

    async def score():
        worker = actors.RewardWorker({"mine": {"factory": given}})
        try:
            await worker.start()
            return await worker.score("mine", doubles.task_of(), "text")
        finally:
            await worker.shutdown()

    assert within_seconds(score()).problem.startswith(f"raised {name}")


@pytest.mark.parametrize(("name", "body"), PLAIN.items())
def test_what_a_factory_or_a_function_on_the_loop_raises_names_its_field(name, body):
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.x: mine:make raised {name}"):
        resolving.call(body, "mine:make", {}, "task.x")
    with (
        pytest.raises(protocols.ConfigError, match=f"the call of mine:f raised {name}"),
        resolving.named("mine:f", "algorithm.filter", "the call"),
    ):
        body()
    read = tool_results.checked(body, lambda verb, problem: protocols.EnvironmentCrashed(f"{verb} {problem}"))
    with pytest.raises(protocols.EnvironmentCrashed, match=f"status raised {name}"):
        read(None, protocols.Message("tool", ""))


@pytest.mark.parametrize("verb", ["open", "tools"])
@pytest.mark.parametrize(("name", "body"), PLAIN.items())
def test_what_a_shared_tool_raises_when_it_opens_is_an_error(monkeypatch, verb, name, body):
    class Shared:
        async def open(self): ...
        async def close(self):
            raise SystemExit(0)

        def tools(self):
            return []

    setattr(Shared, verb, in_async(body) if verb == "open" else body)
    monkeypatch.setattr("libra_jax.utils.resolving.resolve", lambda *_: Shared)

    async def opened():
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("mine:Shared",)), config_lib.SandboxConfig()):
            pass

    with pytest.raises(Exception, match=name.removeprefix("ValueError: ")):
        within_seconds(opened())


@pytest.mark.parametrize("code", [0, 3])
def test_a_module_that_exits_at_its_import_names_its_field(tmp_path, monkeypatch, code):
    (tmp_path / f"exits_{code}.py").write_text(f"import sys\nsys.exit({code})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(protocols.ConfigError, match=rf"task\.source: importing exits_{code} raised SystemExit: {code}"):
        resolving.resolve(f"exits_{code}:f", "task.source")


def test_a_cancellation_by_the_run_and_the_ends_that_signals_ask_for_pass():
    async def cancelled():
        task = asyncio.ensure_future(deadlines.call(doubles.forever))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    within_seconds(cancelled())
    for error in (KeyboardInterrupt(), user_code.SignalExit(75)):
        with pytest.raises(type(error)):
            resolving.call(raises(error), "mine:make", {}, "task.x")
    waiting = deadlines.call(paused)
    waiting.send(None)
    waiting.close()


@types.coroutine
def pause():
    yield


async def paused():
    await pause()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("convrt", "; did you mean 'convert'?"),
        ("zzz", "; it has convert, tables$"),
        ("qqqq", "; it has convert, tables$"),
    ],
)
def test_a_missing_name_of_a_module_names_the_nearest_or_all(tmp_path, monkeypatch, name, hint):
    (tmp_path / "units_kv.py").write_text(
        "from os import path\ndef convert(): ...\ndef tables(): ...\ndef _no(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(protocols.ConfigError, match=f"units_kv has no '{name}'{hint}".replace("?", r"\?")):
        resolving.resolve(f"units_kv:{name}", "tools.use")
