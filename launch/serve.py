"""Serves a run's checkpoint or a model to any OpenAI or Anthropic client, by the gateway that trains agents.

  python launch/serve.py --workdir=runs/mine
  python launch/serve.py --model=Qwen/Qwen3-0.6B --config=configs/questions.py --port=8000

The address, the key and an example are printed. Ctrl-C ends it. Requests may name a temperature,
top_p, top_k, min_p and penalties. A seed and structured output are refused (docs/reference/gateway.md).
"""

from __future__ import annotations

from pathlib import Path

from support import cli, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import protocols
from libra_jax.build import evaluating, serving

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file that names the engine and the tokenizer, beside --model.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run; its config and its newest checkpoint count.")
_STEP = flags.DEFINE_integer("step", None, "Training step of the checkpoint in --workdir; default the newest.")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory or id, instead of --workdir.")
_HOST = flags.DEFINE_string("host", None, "Address to listen at; default gateway.host of the config, the loopback.")
_PORT = flags.DEFINE_integer("port", None, "Port to listen at, 0 is any; default gateway.port of the config.")
_KEY_ENV = flags.DEFINE_string("key_env", "", "Environment variable with the clients' key; default a random key.")


def show(endpoint: protocols.Endpoint) -> None:
    """Prints how to reach the model."""
    print(f"Serving {endpoint.model} at {endpoint.url}; Ctrl-C ends it.")
    print(f"Anthropic's client takes {endpoint.url.removesuffix('/v1')}. For example:\n")
    if not _KEY_ENV.value:
        print(f"  export OPENAI_API_KEY={endpoint.secret}")
    key = _KEY_ENV.value or "OPENAI_API_KEY"
    body = f'{{"model": "{endpoint.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(f'  curl {endpoint.url}/chat/completions -H "Authorization: Bearer ${key}" \\')
    print(f"    -H 'Content-Type: application/json' -d '{body}'\n", flush=True)


def main() -> None:
    request = evaluating.EvaluationRequest(
        workdir=None if _WORKDIR.value is None else Path(_WORKDIR.value), step=_STEP.value, model=_MODEL.value
    )
    explicit_config = None if _CONFIG.value is None else overrides.config(flags.FLAGS["config"])
    serving.serve(request, explicit_config, host=_HOST.value, port=_PORT.value, key_env=_KEY_ENV.value, ready=show)
    print("The server has ended.")


if __name__ == "__main__":
    cli.run(main, interrupted="interrupted")
