"""Filters and budgets as users write them."""

from __future__ import annotations


def without_task(group, *, index):
    return f"task {index} is not wanted" if group.task.payload["index"] == index else None


def broken(group):
    return group.task.payload["no such field"]


def talkative(group):
    return True


def all_to_the_first(prompts, total, least, most, *, first=None):
    """Gives the first prompt as many rollouts as it may have."""
    sizes = [least] * len(prompts)
    for place in range(len(sizes)):
        sizes[place] += min((first or most) - least, total - sum(sizes))
    return sizes


def one_too_few(prompts, total, least, most):
    return [total // len(prompts)] * (len(prompts) - 1)


def dividing_by_zero(prompts, total, least, most):
    return [total // 0]
