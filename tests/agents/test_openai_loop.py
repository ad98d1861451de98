"""The loop around an `openai` client: the native environment's prompts, returns and rewards, token for token."""

import asyncio

import harness_doubles
import loop_doubles
import pytest
import session_doubles

from libra_jax import config, protocols
from libra_jax.agents import calculator, chat_format, harness_loop, loop, tokenizers
from libra_jax.agents.environments import harness
from libra_jax.agents.environments.harness import openai_loop
from libra_jax.gateway import server

pytest.importorskip("openai")
LOOP = "libra_jax.agents.environments.harness.openai_loop"
LIMITS = loop.Limits(max_turns=4, max_tokens=40, max_context=160, tool_seconds=30.0, temperature=1.0)
TASKS = calculator.task_source()
