"""A bucket's lazily kept heaps against a look at every instance."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.scheduling import buckets

SLOTS = (1, 3, 2, 3)
EVENTS = st.lists(st.tuples(st.sampled_from(["occupy", "release", "least"]), st.integers(0, 3)), max_size=120)
CONTEXTS = st.lists(
    st.tuples(st.sampled_from(["occupy", "release", "least"]), st.integers(0, 3), st.integers(0, 9)), max_size=120
)
QUEUES = st.lists(st.tuples(st.sampled_from(["join", "leave", "longest"]), st.integers(0, 3)), max_size=120)


def servers() -> list[buckets.InstanceQueue]:
    made = []
    for place, slots in enumerate(SLOTS):
        instance = protocols.Instance(f"engine-{place}", 1, slots)
        made.append(buckets.InstanceQueue(instance, place, buckets.Queue(buckets.ORDERS["fcfs"])))
        made[-1].announce(instance, place)
    return made


def bucket_of(items: list[buckets.InstanceQueue], busy) -> buckets.Bucket:
    bucket = buckets.Bucket(0, buckets.Queue(buckets.ORDERS["fcfs"]), busy)
    for server in items:
        bucket.add(server)
    return bucket


def check(bucket: buckets.Bucket, items: list[buckets.InstanceQueue], busy) -> None:
    free = [server for server in items if not server.full]
    assert bucket.free == sum(server.slots - server.load for server in items)
    if free:
        assert bucket.least_busy() is min(free, key=lambda item: (busy(item), -item.slots, item.place))


@hypothesis.given(EVENTS)
def test_the_least_loaded_instance_is_the_one_that_a_look_at_all_finds(events):
    items = servers()
    bucket = bucket_of(items, buckets.share_in_use)
    for event, place in events:
        server = items[place]
        if event == "occupy" and not server.full:
            bucket.occupy(server)
        elif event == "release" and server.load:
            bucket.release(server)
        elif event == "least":
            check(bucket, items, buckets.share_in_use)
    check(bucket, items, buckets.share_in_use)


@hypothesis.given(CONTEXTS)
def test_so_is_the_one_with_the_least_context_which_changes_apart_from_the_load(events):
    def busy(server: buckets.InstanceQueue) -> float:
        return server.context

    items = servers()
    bucket = bucket_of(items, busy)
    for event, place, context in events:
        server = items[place]
        if event == "occupy" and not server.full:
            bucket.occupy(server)
            server.context += context
        elif event == "release":
            server.context = min(server.context, context)
            if server.load:
                bucket.release(server)
            else:
                bucket.eased(server)
        elif event == "least":
            check(bucket, items, busy)
    check(bucket, items, busy)


@hypothesis.given(QUEUES)
def test_the_longest_queue_is_the_one_that_a_look_at_all_finds(events):
    items = servers()
    crowds = buckets.Crowds(items)
    for event, place in [*events, ("longest", 0)]:
        queue = items[place].queue
        if event == "join":
            queue.size += 1
            crowds.joined(items[place])
        elif event == "leave" and queue.size:
            queue.size -= 1
        elif event == "longest":
            waited_for = [server for server in items if server.queue.size]
            expected = min(waited_for, key=lambda item: (-item.queue.size, item.place), default=None)
            assert crowds.longest() is expected
