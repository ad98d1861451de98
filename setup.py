"""Packaging. What each platform installs beside it is pinned, with a reason a line, in third_party/.

The scheduler and the planner's model of queues are pure Python and run as they are. With LIBRA_JAX_COMPILE=1 in the
environment, mypyc compiles them to C on the way: the same answers in half the time. That takes mypy and a C compiler,
and an install that is not editable.
"""

import glob
import os

from setuptools import find_packages, setup


def compiled():
    """The extension modules to build: none unless asked for."""
    if os.environ.get("LIBRA_JAX_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    queues = ["libra_jax/planning/forecast/pipeline.py", "libra_jax/planning/forecast/degree_queues.py"]
    return mypycify(sorted(glob.glob("libra_jax/scheduling/[!_]*.py")) + queues)


setup(
    name="libra-jax",
    version="0.1.0",
    description="Agentic RL post-training of language models on JAX and vLLM, elastic between training and rollout",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["libra_jax", "libra_jax.*"]),
    ext_modules=compiled(),
    package_data={
        "libra_jax.models": ["presets/*.json"],
        "libra_jax.telemetry.report": ["templates/*.j2"],
        "libra_jax.training": ["targets/*.txtpb"],
    },
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12.8",
        "google-re2>=1.1",
        "huggingface_hub>=1.31",
        "jax>=0.10.2",
        "jinja2>=3.1",
        "jsonschema>=4.23",
        "markupsafe>=2.1",
        "matplotlib>=3.9",
        "ml_collections>=1.1",
        "numpy>=1.26",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "prometheus-client>=0.22",
        "psutil>=6",
        "pyarrow>=17",
        "pyyaml>=6",
        "referencing>=0.30",
        "rich>=13",
        "safetensors>=0.6.2",
        "tensorboardX>=2.6",
        "torch>=2.13",
        "transformers>=5.16",
        "xxhash>=3.5",
    ],
    extras_require={
        "gateway": ["httptools>=0.6.3", "pydantic>=2.12", "starlette>=1.0.1", "uvicorn>=0.54"],
        "gymnasium": ["gymnasium>=1.2"],
        "judge": ["openai>=3.52"],
        "math": ["math-verify[antlr4_13_2]>=0.9"],
        "mcp": ["mcp>=2.3"],
        "openenv": ["websockets>=15"],
        "ray": ["grpcio>=1.60", "ray>=2.60"],
        "reasoning_gym": ["reasoning-gym>=0.1.25"],
        "teacher": ["openai>=3.52"],
        "wandb": ["wandb"],
    },
    entry_points={
        # vLLM calls this in every process it starts: our weight-transfer engine, and death with the parent.
        "vllm.general_plugins": ["libra_jax = libra_jax.engines.vllm_plugin:register"],
    },
)
