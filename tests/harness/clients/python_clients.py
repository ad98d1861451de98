"""Agents of other packages as their users write them, at their defaults: `python_clients.py NAME` adds 17 and 25.

Each finds the session by its environment variables, and prints what its loop ended with.
"""

import asyncio
import os
import sys

QUESTION = "What is 17 + 25? Use the tool."
URL, KEY, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def openai_agents():
    import agents

    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="adder", tools=[agents.function_tool(add)], model=MODEL)
    print(agents.Runner.run_sync(agent, QUESTION).final_output)


def openai_agents_typed():
    import agents
    import pydantic

    class Answer(pydantic.BaseModel):
        value: int

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(tool_choice="required")
    agent = agents.Agent(
        name="adder", tools=[agents.function_tool(add)], model=MODEL, output_type=Answer, model_settings=settings
    )
    print(agents.Runner.run_sync(agent, QUESTION).final_output.value)


def pydantic_ai():
    import pydantic
    from pydantic_ai import Agent

    class Answer(pydantic.BaseModel):
        value: int

    agent = Agent(f"openai:{MODEL}", tools=[add], output_type=Answer, model_settings={"seed": 7})
    print(agent.run_sync(QUESTION).output.value)


def langchain():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL, seed=7), tools=[add])
    print(agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].content)


def langchain_anthropic():
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic

    agent = create_agent(ChatAnthropic(model=MODEL), tools=[add])
    print(agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].content)


def smolagents():
    import smolagents as smol

    model = smol.OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY)
    print(smol.ToolCallingAgent(tools=[smol.tool(add)], model=model).run(QUESTION))


def smolagents_code():
    import smolagents as smol

    model = smol.OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY)
    print(smol.CodeAgent(tools=[smol.tool(add)], model=model).run(QUESTION))


def instructor():
    import instructor as lib
    import openai
    import pydantic

    class Answer(pydantic.BaseModel):
        value: int

    client = lib.from_openai(openai.OpenAI())
    messages = [{"role": "user", "content": QUESTION}]
    print(client.chat.completions.create(model=MODEL, response_model=Answer, messages=messages).value)


def anthropic_runner():
    import anthropic

    tool = anthropic.beta_tool(lambda a, b: str(add(a, b)), name="add", description="Adds.", input_schema={
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]
    })  # fmt: skip
    runner = anthropic.Anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[tool], messages=[{"role": "user", "content": QUESTION}]
    )
    print([block.text for block in runner.until_done().content if block.type == "text"][-1])


def strands():
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    agent = Agent(model=OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL), tools=[tool(add)])
    print(agent(QUESTION))


def agno():
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    print(Agent(model=OpenAIChat(id=MODEL), tools=[add], telemetry=False).run(QUESTION).content)


def llama_index():
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)

    async def run():
        return await FunctionAgent(tools=[add], llm=model).run(QUESTION)

    print(asyncio.run(run()))


def litellm():
    import json

    import litellm as lib

    messages = [{"role": "user", "content": QUESTION}]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
    while True:
        answer = lib.completion(
            model=f"openai/{MODEL}", api_base=URL, api_key=KEY, messages=messages, tools=tools, seed=1
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return print(message.content)
        for call in message.tool_calls:
            value = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})


def mini_swe_agent():
    from pathlib import Path

    import yaml
    from minisweagent import config as configs
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    read = yaml.safe_load((Path(configs.__file__).parent / "mini.yaml").read_text())
    parts = {
        **read["model"],
        "model_kwargs": {**read["model"].get("model_kwargs", {}), "api_base": URL, "api_key": KEY},
    }
    known = ("system_template", "instance_template", "step_limit", "cost_limit")
    agent = DefaultAgent(
        LitellmModel(**{**parts, "model_name": f"openai/{MODEL}", "cost_tracking": "ignore_errors"}),
        LocalEnvironment(),
        **{name: value for name, value in read["agent"].items() if name in known},
    )
    print(agent.run("Read the number in data.txt."))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
