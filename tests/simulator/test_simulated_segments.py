"""Rollouts of several segments: what is prefilled, trained, recorded and replayed."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
import recorded_runs
import simulator_doubles as doubles
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import faults, results, scripts, traces, trajectory, workloads
from libra_jax.telemetry import trace


def call(generated: int, payload: int = 10, seconds: float = 0.5) -> protocols.Turn:
    return protocols.Turn(generated, "look", "success", payload, seconds)


DEEP = scripts.Script(
    100,
    (call(20, 30), call(5, 7, 3.0), call(40, 50), protocols.Turn(9), call(8, 6), protocols.Turn(11)),
    None,
    (scripts.ScriptedSegment(0, 60, 25), scripts.ScriptedSegment(0, 100, 15)),
    (0, 0, 1, 1, 0, 2),
)
"""A first segment; a sub-agent that shares 60 tokens; the first again; and a summary after the prompt of 100."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same rollout, always."""

    one: scripts.Script

    def script(self, task_index: int, sample: int) -> scripts.Script:
        return self.one


@dataclasses.dataclass(frozen=True)
class SeededSegments:
    """Small rollouts that summarise their history and call sub-agents."""

    seed: int = 0

    def script(self, task_index: int, sample: int) -> scripts.Script:
        rng = random.Random(f"{self.seed}/{task_index}/{sample}")
        turns, places, segments = [], [], []
        main = 0
        for _ in range(rng.randint(1, 12)):
            turns.append(call(rng.randint(1, 90), rng.randint(0, 80), rng.expovariate(2.0)))
            places.append(main)
            if rng.random() < 0.3:
                segments.append(scripts.ScriptedSegment(0, 40, rng.randint(1, 30)))
                turns += [call(rng.randint(1, 30)), protocols.Turn(rng.randint(1, 20))]
                places += [len(segments)] * 2
            if rng.random() < 0.2:
                segments.append(scripts.ScriptedSegment(0, 100, rng.randint(5, 50)))
                main = len(segments)
        turns.append(protocols.Turn(rng.randint(1, 60)))
        places.append(main)
        return scripts.Script(100, tuple(turns), None, tuple(segments), tuple(places))


def work(config: config_lib.RunConfig, workload: scripts.Workload) -> list[scripts.Script]:
    limits = config.coordinator
    tasks = range(config.steps * limits.groups_per_step)
    return [workload.script(task, sample) for task in tasks for sample in range(limits.group_size)]


def test_a_script_tells_the_context_of_each_output():
    outputs = [(each.segment, each.cached, each.fresh, each.goes_on) for each in DEEP.outputs()]
    assert outputs == [
        (0, 0, 100, True),
        (0, 120, 30, True),
        (1, 60, 25, True),
        (1, 125, 50, False),
        (0, 155, 7, False),
        (2, 100, 15, False),
    ]
    assert DEEP.context_tokens == 125 + 50 + 9
    assert DEEP.own_tokens == (155 + 7 + 8) + (25 + 40 + 50 + 9) + (15 + 11)
    assert DEEP.generated_tokens == 93


def alone(script: scripts.Script, **changes: Any) -> tuple[Any, Any]:
    """Runs one rollout a step on one idle instance. Returns the result, and the trained trajectory."""
    kept = []

    class Kept(trajectory.CountedTrajectory):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            kept.append(self)

    config = doubles.run_config(
        steps=1,
        rollout={"tensor_parallel": (1,), "slots": 4},
        coordinator={"groups_per_step": 1, "group_size": 1, "max_staleness": 0},
        scheduler={"policy": "cmlfq", "max_remaining_tokens": ()},
        **changes,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory, "CountedTrajectory", Kept)
        result = doubles.simulate_workload(config, Fixed(script))
    return result, kept[0]


def test_a_segment_prefills_what_the_cache_lacks_and_trains_what_it_does_not_share():
    result, rollout = alone(DEEP)
    assert [segment.name for segment in rollout.segments] == ["0/0", "0/0+1", "0/0+2"]
    assert [len(segment.token_ids) for segment in rollout.segments] == [170, 124, 26]
    assert [segment.shared for segment in rollout.segments] == [0, 60, 100]
    assert [segment.context_tokens for segment in rollout.segments] == [170, 184, 126]
    assert rollout.sampled_tokens == result.generated_tokens == 93
    # Each token that no output sampled is prefilled once.
    assert result.prefilled_tokens == 100 + 30 + 25 + 50 + 7 + 15
    assert result.kv_recompute_token_fraction == 0.0
    turns = [(turn.generated_tokens, turn.tool, turn.payload_tokens) for turn in rollout.all_turns]
    assert turns == [(20, "look", 30), (5, "look", 7), (40, "look", 50), (9, None, 0), (8, "look", 0), (11, None, 0)]


def test_a_tool_runs_beside_the_outputs_of_a_sub_agent():
    """The second call of the first segment takes its time while the sub-agent works."""
    slow = dataclasses.replace(DEEP, turns=(DEEP.turns[0], call(5, 7, 200.0), *DEEP.turns[2:]))
    quick, late = (alone(script)[1] for script in (DEEP, slow))
    starts = [[turn.start_seconds for turn in rollout.all_turns] for rollout in (quick, late)]
    assert starts[0][:4] == pytest.approx(starts[1][:4])
    assert starts[1][4] - starts[1][2] > 190
    assert starts[0][4] - starts[0][2] < 10
    assert late.turns[1].tool_seconds == 200.0


def test_limits_end_a_rollout_of_segments():
    for changes, finish in (({"max_turns": 3}, "max_turns"), ({"max_tokens": 30}, "max_tokens")):
        rollout = alone(DEEP, task=changes)[1]
        assert (rollout.finish, len(rollout.all_turns)) == (finish, 3)
    with pytest.raises(protocols.ConfigError, match="max_seconds: seconds of rollouts with several segments"):
        alone(DEEP, task={"max_seconds": 60.0})


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_every_policy_runs_segments_and_loses_nothing(policy):
    config = doubles.run_config(scheduler={"policy": policy})
    workload = SeededSegments()
    first, second = (doubles.simulate_workload(config, workload) for _ in range(2))
    doubles.check_whole(first, config)
    assert first.step_seconds == second.step_seconds
    drawn = work(config, workload)
    assert first.generated_tokens == sum(script.generated_tokens for script in drawn)
    segments = sum(1 + len(script.segments) for script in drawn)
    assert sum(step["segments/mean"] for step in first.steps) * len(drawn) / config.steps == pytest.approx(segments)


def test_a_recorded_run_replays_to_the_same_work(tmp_path):
    config = recorded_runs.record(tmp_path, SeededSegments(3), scheduler={"policy": "cmlfq"}, steps=4)
    records = trace.read(tmp_path / "trace.jsonl")
    assert any("segments" in record for record in records)
    groups: dict[int, dict[int, scripts.Script]] = {}
    for record, (_, script) in zip(records, traces.read(tmp_path / "trace.jsonl"), strict=True):
        task, sample = map(int, record["trajectory_id"].split("/"))
        groups.setdefault(task, {})[sample] = script
    original = SeededSegments(3)
    replayed = tuple(tuple(groups[task][sample] for sample in sorted(groups[task])) for task in sorted(groups))
    workload = traces.RecordedWorkload(replayed, 0, 0.0, config.rollout.max_context, shuffle=False)
    for script, again in zip(work(config, original), work(config, workload), strict=True):
        assert again.generated_tokens == script.generated_tokens
        assert again.own_tokens == script.own_tokens
        assert [each[1:] for each in again.outputs()] == [each[1:] for each in script.outputs()]
    first, second = (doubles.simulate_workload(config, one) for one in (original, workload))
    for name in ("generated_tokens", "prefilled_tokens", "trained_tokens_mean", "seconds", "moves"):
        assert getattr(first, name) == pytest.approx(getattr(second, name)), name


def test_engines_that_die_lose_no_segment():
    config = doubles.run_config(rollout={"restarts": 20}, scheduler={"policy": "cmlfq"})
    parts = faults.parts(faults.FaultConfig(engine_life_seconds=20.0, environment_crash=0.02), 0)
    result = doubles.simulate_workload(config, SeededSegments(), parts=parts)
    assert result.lost_trajectories == result.duplicated_trajectories == 0
    assert result.trained_trajectories == config.steps * 12


@given(st.integers(0, 60), st.floats(0.0, 2.0), st.integers(400, 8_000))
def test_a_sibling_of_segments_is_well_formed(seed, sigma, room):
    recorded = SeededSegments(seed).script(0, 0)
    made = traces.sibling(recorded, sigma, max(room, recorded.context_tokens // 2), random.Random(seed))
    assert made.turns[-1].tool == recorded.turns[-1].tool
    assert len(made.places) == (len(made.turns) if made.segments else 0)
    record = {
        "trajectory_id": "0/0",
        "prompt_id": "0",
        "prompt_tokens": made.prompt_tokens,
        "turns": [
            {
                "generated_tokens": turn.generated_tokens,
                "tool": turn.tool,
                "status": turn.status,
                "payload_tokens": turn.payload_tokens,
                "tool_seconds": turn.tool_seconds,
                "segment": place,
            }
            for turn, place in zip(made.turns, made.places or (0,) * len(made.turns), strict=True)
        ],
        "segments": [
            {"parent": None, "shared_tokens": 0, "prompt_tokens": made.prompt_tokens},
            *(dataclasses.asdict(segment) for segment in made.segments),
        ],
    }
    assert trace.is_record(record)
    if sigma == 0 and recorded.context_tokens + 200 < room:
        assert (made.segments, made.places) == (recorded.segments, recorded.places)
        assert made.generated_tokens == recorded.generated_tokens


LINE: dict[str, Any] = {
    "trajectory_id": "a",
    "prompt_id": "p",
    "prompt_tokens": 10,
    "turns": [
        {
            "generated_tokens": 5,
            "tool": "t",
            "status": "success",
            "payload_tokens": 2,
            "tool_seconds": 0,
            "segment": place,
        }
        for place in (0, 1, 0)
    ],
    "segments": [
        {"parent": None, "shared_tokens": 0, "prompt_tokens": 10},
        {"parent": 0, "shared_tokens": 17, "prompt_tokens": 3},
    ],
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    record = json.loads(json.dumps(LINE))
    holder = record
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            ("segments", 1, "shared_tokens"),
            18,
            'segment 1: "shared_tokens" must be at most 17, the tokens of segment 0',
        ),
        (("segments", 1, "parent"), 1, 'segment 1: "parent" must be the number of an earlier segment'),
        (("segments", 1, "parent"), 7, 'segment 1: "parent" must be the number of an earlier segment'),
        (("segments", 1, "parent"), None, 'segment 1: "shared_tokens" must be 0 without a "parent", not 17'),
        (("segments", 0, "parent"), 0, 'segment 0: "parent" must be null'),
        (("segments", 1, "prompt_tokens"), -1, 'segment 1: "prompt_tokens" must be a whole number'),
        (("turns", 1, "segment"), 2, 'turn 1: "segment" must be one of the 2 of "segments", from 0, not 2'),
        (("turns", 1, "segment"), "1", 'turn 1: "segment" must be one of the 2'),
        (("segments",), [], '"segments" must be a list'),
        (("segments", 1), 3, "segment 1: a segment must be a JSON object"),
    ],
)
def test_segments_that_make_no_sense_are_refused_by_file_and_line(tmp_path, path, value, sentence):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(LINE) + "\n" + json.dumps(changed(path, value)) + "\n")
    with pytest.raises(protocols.DataError, match=rf"trace\.jsonl, line 2.*{sentence}"):
        traces.read(file)


def test_the_agents_workload_summarises_and_delegates():
    workload = workloads.Synthetic("agents", 0, 64)
    drawn = [workload.script(task, sample) for task in range(64) for sample in range(8)]
    plain = workloads.Synthetic("swe", 0, 64)
    assert max(script.context_tokens for script in drawn) < 2 * workloads.COMPACTION_TOKENS
    assert any(turn.tool == "task" for script in drawn for turn in script.turns)
    several = [script for script in drawn if script.segments]
    assert 0.1 < len(several) / len(drawn) < 0.9
    whole = sum(plain.script(task, sample).generated_tokens for task in range(64) for sample in range(8))
    assert 1.0 < sum(script.generated_tokens for script in drawn) / whole < 1.3


def test_a_context_of_segments_is_as_in_a_real_rollout():
    counted = trajectory.CountedTrajectory("0/0", "0", script=DEEP)
    real = protocols.Trajectory("0/0", "0")
    for made in (counted, real):
        made.append_text([trajectory.TEXT] * 30, protocols.TokenSource.PROMPT)
    pairs = [(counted.begin(1, counted, 20), real.branch(real, 20))]
    for pair in pairs[0]:
        pair.append_text([trajectory.TEXT] * 5, protocols.TokenSource.PROMPT)
    pairs.append((counted.begin(2, pairs[0][0], 24), real.branch(pairs[0][1], 24)))
    pairs.append((counted.begin(2, pairs[1][0], 12), real.branch(pairs[1][1], 12)))
    for mine, its in pairs:
        assert (mine.name, mine.shared) == (its.name, its.shared)
        assert (mine.parent and mine.parent.name) == (its.parent and its.parent.name)
        assert list(mine.context()[:]) == list(its.context())


def test_the_trace_of_a_simulated_run_can_be_replayed(tmp_path):
    recorder = results.TraceRecorder()
    config = doubles.run_config(steps=2)
    doubles.simulate_workload(config, SeededSegments(), recorder=recorder)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in recorder.trace))
    read = sorted(script.generated_tokens for _, script in traces.read(path))
    assert read == sorted(script.generated_tokens for script in work(config, SeededSegments()))


def test_buckets_are_fitted_to_the_lengths_of_segments():
    replay = traces.RecordedWorkload(((DEEP,),), 0, 0.0, 1_000)
    assert DEEP.lengths() == {0: 33, 1: 49, 2: 11}
    (bound,) = workloads.fitted_bounds(replay.prompts[0], ((1, ""), (2, "")))
    assert bound in {11, 33, 49}
