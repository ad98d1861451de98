"""Agents that are functions, for tests of harnesses. Standard library only: another interpreter may import this."""

import asyncio
import json
import os
import pathlib
import threading
import time
import urllib.request


def ask(endpoint, text):
    asked = {"model": endpoint.model, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        endpoint.url + "/chat/completions",
        json.dumps(asked).encode(),
        {"Authorization": f"Bearer {endpoint.secret}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def plain(task, endpoint, bonus=0.0):
    assert threading.current_thread() is not threading.main_thread()
    return float(ask(endpoint, task.payload["question"]) == task.payload["answer"]) + bonus


async def asynchronous(task, endpoint, folder):
    answer = await asyncio.to_thread(ask, endpoint, task.payload["question"])
    await asyncio.to_thread(pathlib.Path(folder, "seen").write_text, answer)
    return {"reward": 1.0, "metrics": {"asked": 1}}


def isolated(task, endpoint, folder, bonus=0.0):
    assert os.environ["OPENAI_BASE_URL"] == endpoint.url
    assert os.getcwd() == folder
    answer = ask(endpoint, task.payload["question"])
    return {"reward": float(answer == task.payload["answer"]) + bonus, "metrics": {"process": os.getpid()}}


async def isolated_later(task, endpoint):
    await asyncio.sleep(0)
    return isolated(task, endpoint, os.getcwd())


def broken(task, endpoint):
    raise ValueError("no idea")


def forgetful(task, endpoint):
    return None


def endless(task, endpoint):
    time.sleep(1.0)


async def endless_later(task, endpoint):
    try:
        await asyncio.sleep(600)
    finally:
        endless_later.ended = True


def curious(task, endpoint, access, field="answer"):
    """Looks for a field that it may not see, or that does not exist."""
    if access == "get":
        return 0.5 if task.payload.get(field, "") == "" else 1.0
    if access == "contains":
        return 1.0 if field in task.payload else 0.5
    try:
        return float(task.payload[field])
    except KeyError:
        return 0.5
