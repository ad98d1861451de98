"""The drills of tests/drills: what its judges find wrong, what its flags refuse, and one run that is hit."""

import json
import os
import random
import subprocess
import sys
import types

import psutil
import pytest
import real_runs
import scripts

from libra_jax import protocols
from tests.drills import blows, judging, kills, network_hosts, partition, processes, report, runs

GROUPS, ATTEMPTS, STEPS = 2, 2, 3
METRICS = [{"step": step, "loss": 0.0, "groups/replaced": 0} for step in range(1, STEPS + 1)]
NOTHING = processes.Left()


def trace(*prompts: tuple[int, int], attempts: int = ATTEMPTS) -> list[dict]:
    """Records of (prompt, step), each prompt with its attempts."""
    return [
        {"prompt_id": f"calculator-train-{prompt}", "step": step} for prompt, step in prompts for _ in range(attempts)
    ]


WHOLE = [(prompt, prompt // GROUPS + 1) for prompt in range(GROUPS * STEPS)]


def count(records: list[dict], metrics: list[dict] = METRICS) -> judging.Prompts:
    return judging.prompts(records, metrics, groups=GROUPS, attempts=ATTEMPTS, steps=STEPS)


def test_every_prompt_of_a_whole_run_was_trained_once():
    assert count(trace(*WHOLE)) == judging.Prompts(once=6)


def test_a_prompt_of_two_steps_was_trained_twice():
    assert count(trace(*WHOLE, (1, 3))) == judging.Prompts(once=5, twice=1)


def test_a_prompt_with_an_attempt_too_many_was_trained_twice():
    assert count(trace(*WHOLE) + trace((1, 1), attempts=1)) == judging.Prompts(once=5, twice=1)


@pytest.mark.parametrize(
    "records", [trace(*WHOLE[:-1]), trace(*WHOLE[:-1]) + trace(WHOLE[-1], attempts=1)], ids=["never", "in_part"]
)
def test_a_prompt_that_was_not_trained_is_lost(records):
    assert count(records) == judging.Prompts(once=5, lost=1)


def test_a_prompt_that_was_replaced_is_not_lost_and_one_more_is():
    replaced = [{**METRICS[0], "groups/replaced": 1}, *METRICS[1:]]
    others = [(6 if prompt == 2 else prompt, step) for prompt, step in WHOLE]
    assert count(trace(*others), replaced) == judging.Prompts(once=6, replaced=1)
    assert count(trace(*others[:2], *others[3:]), replaced) == judging.Prompts(once=5, lost=1, replaced=1)


def test_steps_that_were_recorded_twice_or_not_at_all_are_named():
    assert judging.wrong_steps(METRICS, STEPS) == ""
    assert judging.wrong_steps([METRICS[0], METRICS[0], METRICS[2]], STEPS) == (
        "metrics.jsonl holds steps [1] twice and lacks [2]"
    )


LOG = """libra-jax · drill-narrow · 40 training steps
SIGTERM: stopping, with a checkpoint, within 20 s.
rollout-0: no weights yet, 0 requests running
step  9/40  reward 0.117  229 tokens/s
Engine rollout-0 was lost (its process 8 died); its requests wait, and it is started again (restart 1 of 3).
step 10/40  reward 0.092  11 tokens/s
hybrid-1 is ended: its process 9 died
W1123 02:50:00.123456 1234 pool.py:140] The sandbox of process 5 ended.
error: trainer.1 is lost
"""


def test_the_longest_step_is_one_after_the_blow():
    metrics = [{"step": step, "step/seconds": seconds} for step, seconds in enumerate((9.0, 1.0, 3.0), start=1)]
    assert judging.longest_step(metrics, after=1) == 3.0
    assert judging.longest_step(metrics, after=3) == 0.0


def test_a_log_tells_its_last_step_and_its_sentences():
    assert judging.last_step(LOG) == 10
    assert judging.last_step("") == 0
    first, second, *others = judging.sentences(LOG)
    assert first.startswith("SIGTERM: stopping")
    assert second.startswith("Engine rollout-0 was lost")
    assert others == [
        "hybrid-1 is ended: its process 9 died",
        "The sandbox of process 5 ended.",
        "error: trainer.1 is lost",
    ]


def judge(**changed) -> list[str]:
    good = {
        "log": LOG,
        "said": judging.sentences(LOG),
        "expected": "Engine rollout-0 was lost",
        "again_seconds": 1.0,
        "ended": False,
        "may_end": False,
        "steps": "",
        "trained": judging.Prompts(once=6),
        "left": NOTHING,
    }
    return judging.problems(**{**good, **changed})


def test_a_drill_that_went_as_it_should_has_no_problems():
    assert judge() == []
    assert judge(ended=True, may_end=True) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"said": ["Something else happened."]}, "no sentence of the log tells"),
        ({"log": LOG + "Traceback (most recent call last):\n"}, "a traceback"),
        ({"again_seconds": None}, "did not go on"),
        ({"ended": True}, "ended, and should have gone on"),
        ({"steps": "metrics.jsonl lacks [2]"}, "lacks [2]"),
        ({"trained": judging.Prompts(once=5, lost=1)}, "1 prompts were lost"),
        ({"trained": judging.Prompts(once=5, twice=1)}, "1 prompts were trained twice"),
        ({"trained": judging.Prompts()}, "no prompt was trained"),
        ({"left": processes.Left(processes=("raylet (7)",))}, "raylet (7) was left behind"),
        ({"left": processes.Left(ports=("127.0.0.1:6379",))}, "127.0.0.1:6379 was left behind"),
    ],
)
def test_each_thing_that_is_wrong_is_a_problem(changed, problem):
    (found,) = judge(**changed)
    assert problem in found


class Victim:
    """Something that can be killed, once."""

    pid, killed = 7, 0

    def kill(self, *_: int) -> None:
        self.killed += 1


@pytest.mark.parametrize(
    ("strike", "node", "headless"),
    [
        (kills.Scene.kill_driver, "host-0", True),
        (kills.Scene.kill_head, "host-0", True),
        (kills.Scene.kill_raylet, "host-0", True),
        (kills.Scene.kill_raylet, "host-1", False),
    ],
)
def test_a_run_may_end_where_its_driver_was_hit_or_ray_beside_it(monkeypatch, strike, node, headless):
    run, victim, hosts = types.SimpleNamespace(process=Victim()), Victim(), Victim()
    run.hosts = lambda: [{"node": node, "address": "127.0.0.1"}]
    scene = kills.Scene(run, hosts, None, random.Random(0), "wide")
    monkeypatch.setattr(scene, "find", lambda *_: victim)
    assert not scene.headless
    strike(scene)
    assert run.process.killed + victim.killed >= 1
    assert scene.headless is headless


@pytest.mark.parametrize("may_end", [True, False])
def test_a_run_that_ends_and_has_to_be_started_again_fails_its_drill_unless_it_may(tmp_path, monkeypatch, may_end):
    script = tmp_path / "run.py"
    script.write_text("import sys; print('step  9/40  x'); sys.exit('error: trainer.1 is lost' if sys.argv[1:] else 0)")
    plan = runs.Plan("fake", STEPS, tmp_path / "runs", 0, 0.5, lambda _: None)
    plan.workdir.mkdir()
    run = runs.Run(plan, "drilled", "wide")
    monkeypatch.setattr(run, "_arguments", [str(script)])
    monkeypatch.setattr(run, "prompts", lambda: judging.Prompts(once=6))
    monkeypatch.setattr(run, "wrong_steps", lambda: "")
    run.start({}, "ends")
    run.wait(lambda: False, "end")
    blow = blows.Blow(run, "is lost")
    monkeypatch.setattr(blow, "said", lambda: judging.sentences(run.all_said()))
    blow.may_end = may_end
    blow.follow(lambda: run.start({}))
    outcome = blow.outcome("drilled", NOTHING)
    assert outcome.ended
    assert outcome.problems == ([] if may_end else ["the run ended, and should have gone on by itself"])


@pytest.fixture
def host(tmp_path, monkeypatch) -> network_hosts.Host:
    """A host whose network the kernel does not let be changed, by a double of `ip`."""
    (tmp_path / "ip").write_text("#!/bin/sh\necho 'Cannot find device' >&2; exit 2\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return network_hosts.Host("host3", "198.18.0.3", "lj-3", tmp_path / "hosts", "ljv3")


def test_a_network_that_cannot_be_changed_is_told_of_in_a_sentence(host):
    with pytest.raises(protocols.LibraError, match=r"`ip link set ljv3 down` ended with status 2: Cannot find device$"):
        host.plug(False)


@pytest.mark.parametrize("stuck", [True, False])
def test_a_partition_that_does_not_heal_fails_its_drill_with_what_came_of_it(host, stuck):
    def drill(_: processes.Family) -> blows.Blow:
        with partition.Healing(host, 0.05) as healing:
            assert healing.awaited
            if stuck:
                raise runs.Stuck("no step after the blow")
        raise AssertionError("it was passed over")

    outcome = blows.carried_out("partition", drill)
    (problem,) = outcome.problems
    assert problem.startswith("host3 did not get its network back: `ip link set ljv3 up` ended with status 2: ")
    assert problem.endswith("; no step after the blow") is stuck


def test_a_partition_that_heals_in_time_is_waited_for(host, monkeypatch):
    plugged = []
    monkeypatch.setattr(network_hosts.Host, "plug", lambda _, in_: plugged.append(in_))
    with partition.Healing(host, 0.05) as healing:
        assert not plugged
    assert plugged == [True]
    assert not healing.awaited


@pytest.mark.multiprocess
def test_a_process_that_outlives_a_drill_is_found_with_its_port_also_where_its_parent_has_ended():
    import subprocess
    import sys

    script = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); time.sleep(60)"
    with processes.Family() as family:
        parent = subprocess.Popen(
            ["sh", "-c", '"$0" -c "$1" & wait', sys.executable, script], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout.readline() == "up\n"
        family.alive()
        parent.kill()
        parent.wait(10)
        left = family.left(1.0)
        assert (len(left.processes), len(left.ports)) == (1, 1)
        family.kill()
        assert family.left(10.0) == NOTHING
        parent.stdout.close()


def test_kinds_are_drawn_by_seed_and_each_as_often_as_the_others():
    names = [kind.name for kind in kills.chosen([], "vllm", 20, 3)]
    assert set(names) == {kind.name for kind in kills.KINDS}
    assert max(map(names.count, names)) <= 2
    assert names == [kind.name for kind in kills.chosen([], "vllm", 20, 3)]
    assert names != [kind.name for kind in kills.chosen([], "vllm", 20, 4)]
    assert kills.ENGINE_CORE not in {kind.name for kind in kills.chosen([], "fake", 20, 3)}
    with pytest.raises(protocols.ConfigError, match="is a process of vLLM; give --engine=vllm"):
        kills.chosen([kills.ENGINE_CORE], "fake", 1, 0)
    assert random.Random("0 1").random() == random.Random("0 1").random(), "as runs are seeded"


def test_victims_are_looked_for_among_processes_of_which_some_have_ended_meanwhile():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended, itself = psutil.Process(child.pid), psutil.Process()
    child.communicate(b"\n", timeout=60)
    assert (processes.name(ended), processes.command(ended)) == ("", "")
    assert processes.name(itself) == itself.name()


def test_the_table_says_what_was_skipped_and_what_failed(tmp_path):
    outcomes = [
        judging.Outcome("clock", skipped="this machine has no faketime"),
        judging.Outcome("kill-01-relay", "relay-0", "after step 3", ["a | b"], 1.25, problems=["2 prompts were lost"]),
        judging.Outcome("kill-02-relay", "relay-1", "after step 3", (), 1.25, 7.5),
        judging.Outcome("grace", "SIGTERM", "after step 4", (), 9.0, ended=True, ended_seconds=7.0),
    ]
    assert [outcome.passed for outcome in outcomes] == [False, False, True, True]
    report.write(tmp_path, "fake", outcomes)
    written = json.loads((tmp_path / "drills.json").read_text())["drills"]
    assert [drill["passed"] for drill in written] == [outcome.passed for outcome in outcomes]
    rows = (tmp_path / "drills.md").read_text().splitlines()
    assert len({row.count("|") for row in rows if row.startswith("|")}) == 1
    assert "skipped: this machine has no faketime" in rows[4]
    assert "2 prompts were lost" in rows[5]
    assert "1.2 s; longest step 7.5 s" in rows[6]
    assert "9.0 s (restarted; it had ended after 7.0 s)" in rows[7]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--only=kils", "--workdir=x"), "--only: 'kils' is not one of kills, partition, grace, disk, clock"),
        (("--kinds=gremlin", "--workdir=x"), "--kinds: 'gremlin' is not one of trainer, engine,"),
        (("--runs=0",), "flag --runs=0"),
        ((), "--workdir: say where"),
        (("--workdir=launch",), "launch is not empty; give a new folder"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(flags, problem):
    scripts.assert_one_sentence(scripts.run("tests.drills", *flags), problem)


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.ray
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_run_whose_engine_is_killed_passes_its_drill(tmp_path):
    folder = tmp_path / "drills"
    flags = ("--only=kills", "--kinds=engine", "--runs=1", "--engine=fake", f"--workdir={folder}")
    done = scripts.run("tests.drills", *flags, seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (drill,) = json.loads((folder / "drills.json").read_text())["drills"]
    assert drill["hit"].startswith("rollout-0 (process ")
    assert any(sentence.startswith("Engine rollout-0 was lost") for sentence in drill["said"])
    assert 0 < drill["again_seconds"] < 300
    assert (drill["prompts"]["lost"], drill["prompts"]["twice"], drill["ended"]) == (0, 0, False)
    assert drill["prompts"]["once"] == 2 * max(
        record["step"] for record in real_runs.lines(folder / "kill-01-engine" / "metrics.jsonl")
    )
