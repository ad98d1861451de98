"""Filters and budgets as users write them."""

from __future__ import annotations


def without_task(group, *, index):
    return f"task {index} is not wanted" if group.task.payload["index"] == index else None


def broken(group):
    return group.task.payload["no such field"]


def talkative(group):
    return True
