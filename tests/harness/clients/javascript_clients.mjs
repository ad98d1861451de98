// Agents of JavaScript packages at their defaults: `node javascript_clients.mjs NAME` adds 17 and 25.
// The packages are those beside the folder that LIBRA_JAX_NODE names.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.LIBRA_JAX_NODE + "/package.json");
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const QUESTION = "What is 17 + 25? Use the tool.";
const MODEL = process.env.OPENAI_MODEL;
const SCHEMA = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};

const clients = {
  async openai_node() {
    const { default: OpenAI } = await load("openai");
    const runner = new OpenAI().chat.completions.runTools({
      model: MODEL,
      messages: [{ role: "user", content: QUESTION }],
      tools: [
        { type: "function", function: { name: "add", parameters: SCHEMA, parse: JSON.parse, function: ({ a, b }) => String(a + b) } },
      ],
    });
    return runner.finalContent();
  },
  async ai_sdk() {
    const { generateText, tool, jsonSchema, stepCountIs } = await load("ai");
    const { createOpenAI } = await load("@ai-sdk/openai");
    const add = tool({ description: "Adds.", inputSchema: jsonSchema(SCHEMA), execute: async ({ a, b }) => a + b });
    const model = createOpenAI()(MODEL);
    return (await generateText({ model, prompt: QUESTION, tools: { add }, stopWhen: stepCountIs(5) })).text;
  },
  async ai_sdk_compatible() {
    const { streamText, tool, jsonSchema, stepCountIs } = await load("ai");
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const add = tool({ description: "Adds.", inputSchema: jsonSchema(SCHEMA), execute: async ({ a, b }) => a + b });
    const provider = createOpenAICompatible({ name: "x", baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
    return await streamText({ model: provider(MODEL), prompt: QUESTION, seed: 3, tools: { add }, stopWhen: stepCountIs(5) }).text;
  },
  async ai_sdk_anthropic() {
    const { generateText, tool, jsonSchema, stepCountIs } = await load("ai");
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    const add = tool({ description: "Adds.", inputSchema: jsonSchema(SCHEMA), execute: async ({ a, b }) => a + b });
    const provider = createAnthropic({ baseURL: process.env.ANTHROPIC_BASE_URL + "/v1" });
    return (await generateText({ model: provider(MODEL), prompt: QUESTION, tools: { add }, stopWhen: stepCountIs(5) })).text;
  },
  async openai_agents_js() {
    const { Agent, run, tool, setTracingDisabled } = await load("@openai/agents");
    setTracingDisabled(true);
    const add = tool({ name: "add", description: "Adds.", parameters: SCHEMA, strict: true, execute: async ({ a, b }) => String(a + b) });
    return (await run(new Agent({ name: "adder", model: MODEL, tools: [add] }), QUESTION)).finalOutput;
  },
  async anthropic_node() {
    const { default: Anthropic } = await load("@anthropic-ai/sdk");
    const add = { type: "custom", name: "add", description: "Adds.", input_schema: SCHEMA, parse: (x) => x, run: ({ a, b }) => String(a + b) };
    const runner = new Anthropic().beta.messages.toolRunner({
      model: MODEL, max_tokens: 200, messages: [{ role: "user", content: QUESTION }], tools: [add],
    });
    return (await runner.runUntilDone()).content.filter((block) => block.type === "text").at(-1).text;
  },
  async langgraph_js() {
    const { createReactAgent } = await load("@langchain/langgraph/prebuilt");
    const { ChatOpenAI } = await load("@langchain/openai");
    const { tool } = await load("@langchain/core/tools");
    const { z } = await load("zod");
    const add = tool(async ({ a, b }) => String(a + b), { name: "add", description: "Adds.", schema: z.object({ a: z.number(), b: z.number() }) });
    const agent = createReactAgent({ llm: new ChatOpenAI({ model: MODEL, configuration: { baseURL: process.env.OPENAI_BASE_URL } }), tools: [add] });
    return (await agent.invoke({ messages: [{ role: "user", content: QUESTION }] })).messages.at(-1).content;
  },
};

console.log(await clients[process.argv[2]]());
