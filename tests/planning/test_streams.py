"""Streams out of spans and trace records."""

from libra_jax import protocols
from libra_jax.planning.costs import calibration


def span(request: str, start: float, tokens: int, track: str = "rollout-0", name: str = "generate") -> protocols.Span:
    return protocols.Span(track, 0, name, start, start + 1.0, {"request": request, "tokens": tokens})


def record(name: str, prompt: int, *turns: tuple[int, int]) -> dict:
    return {
        "trajectory_id": name,
        "prompt_tokens": prompt,
        "turns": [{"generated_tokens": generated, "payload_tokens": payload} for generated, payload in turns],
    }


def told(found: list[calibration.RequestStay]) -> list[tuple]:
    return [(item.instance, item.start, item.tokens, item.new, item.cached, item.usable) for item in found]


def test_a_request_prefills_what_its_instance_has_not_seen():
    spans = [span("a/0", 5.0, 7), span("a/0", 0.0, 10), span("a/0", 9.0, 4, "rollout-1"), span("a/0", 12.0, 3)]
    found = calibration.read_streams(spans, [record("a/0", 30, (10, 5), (7, 20), (7, 0))])
    assert told(found) == [
        ("rollout-0", 0.0, 10, 30, 0, True),
        ("rollout-0", 5.0, 7, 5, 40, True),
        ("rollout-1", 9.0, 4, 72, 0, True),  # moved: everything again
        ("rollout-0", 12.0, 3, 76, 0, True),  # moved back in the middle of the output
    ]


def test_streams_of_nobody_in_the_trace_count_and_are_not_known():
    spans = [
        span("held-out/0", 1.0, 9),
        span("a/0", 0.0, 10),
        span("b/0", 2.0, 3),
        span("b/0", 3.0, 3),  # one of the two was given up
        span("a/0", 0.0, 10, "tools", "calculator"),
        protocols.Span("rollout-0", 0, "generate", 0.0, 1.0, {}),
    ]
    found = calibration.read_streams(
        spans, [record("a/0", 30, (10, 0)), record("b/0", 30, (3, 0)), record("c/0", 30, (3, 0))]
    )
    assert told(found) == [
        ("rollout-0", 0.0, 10, 30, 0, True),
        ("rollout-0", 1.0, 9, 0, 0, False),
        ("rollout-0", 2.0, 3, 0, 0, False),
        ("rollout-0", 3.0, 3, 0, 0, False),
    ]


def test_outputs_without_tokens_are_walked_over():
    found = calibration.read_streams(
        [span("a/0", 0.0, 4), span("a/0", 2.0, 6)], [record("a/0", 10, (0, 3), (4, 5), (6, 0))]
    )
    assert [(item.new, item.cached) for item in found] == [(13, 0), (5, 17)]
