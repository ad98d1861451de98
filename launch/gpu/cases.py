"""The cases of `launch/gpu_check.py`, in the order in which they run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from libra_jax import protocols

MODELS = {"0.6B": "Qwen3-0.6B", "1.7B": "Qwen3-1.7B", "4B": "Qwen3-4B"}
EXPERTS = "Qwen3-30B-A3B"
TOKENS = {"8k": (8192, 25.0), "64k": (65_536, 40.0), "32k": (32_768, 25.0)}
"""Tokens of a micro-batch, and the seconds that a case of it takes. Cases of 64k run before those of 32k, because the
budget may leave out the last ones."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: group, a slash and the variant; or the group alone.
      target: function that measures, as "module:function". Its module is imported where the case runs, so that a
        missing package fails this case alone.
      arguments: the function's arguments after the bench.
      expected_seconds: seconds that the case takes on an H100. It is left out if less is left.
      most_seconds: deadline in seconds.
      process: name of the process in which it runs. Neighbours of one name share it; another name's case begins when it
        has ended, because only then is the device's memory free.
    """

    name: str
    target: str
    arguments: tuple[str | int, ...] = ()
    expected_seconds: float = 15.0
    most_seconds: float = 90.0
    process: str = "jax"


ENGINE_CASES: tuple[Case, ...] = (
    Case("engine/libraries", "gpu.engine:libraries", (), 15.0, 60.0, "engine"),
    Case("engine/start", "gpu.engine:start", (), 45.0, 150.0, "engine"),
    Case("engine/log_probs", "gpu.engine:log_probs", (), 65.0, 180.0, "engine"),
    Case("engine/sync/ipc", "gpu.engine:sync", ("ipc",), 30.0, 120.0, "engine"),
    Case("engine/sync/memfd", "gpu.engine:sync", ("memfd",), 30.0, 120.0, "engine"),
    Case("engine/pause", "gpu.engine:pause", (), 30.0, 120.0, "engine"),
    Case("engine/sleep", "gpu.engine:sleep", (), 30.0, 120.0, "engine"),
    Case("quickstart", "gpu.runs:quickstart", (), 80.0, 200.0, "runs"),
    Case("run/0.6B/0", "gpu.runs:random_weights", (MODELS["0.6B"], 0), 55.0, 150.0, "runs"),
    Case("run/0.6B/1", "gpu.runs:random_weights", (MODELS["0.6B"], 1), 50.0, 150.0, "runs"),
    Case("run/1.7B/1", "gpu.runs:random_weights", (MODELS["1.7B"], 1), 60.0, 180.0, "runs"),
    Case("routing", "gpu.runs:routing", (), 50.0, 150.0, "runs"),
    Case("run/1.7B/0", "gpu.runs:random_weights", (MODELS["1.7B"], 0), 60.0, 180.0, "runs"),
)
"""Cases of real vLLM, in order of worth. Their seconds are estimates: none has run on a GPU yet."""

CASES: tuple[Case, ...] = (
    Case("attention/packed", "gpu.attention_parity:measure", ("packed",), 25.0),
    Case("attention/few", "gpu.attention_parity:measure", ("few",)),
    Case("attention/unpacked", "gpu.attention_parity:measure", ("unpacked",)),
    Case("experts", "gpu.expert_parity:measure", (), 40.0, 200.0),
    Case("dlpack", "gpu.moving:dlpack", (), 5.0),
    Case("weight_sync/ipc", "gpu.syncing:torch_memory", (), 25.0),
    Case("weight_sync/memfd", "gpu.syncing:host_memory", (), 25.0),
    Case("vocabulary/1k", "gpu.training_speed:vocabulary", (1024,)),
    Case("vocabulary/4k", "gpu.training_speed:vocabulary", (4096,)),
    Case("reshard", "gpu.moving:reshard", (), 10.0),
    Case("offload", "gpu.moving:offload", (), 10.0),
    Case("checkpoint", "gpu.moving:checkpoint", (), 25.0),
    *(
        Case(f"grad_step/{model}/{count}", "gpu.training_speed:grad_step", (preset, tokens), seconds, 150.0)
        for count, (tokens, seconds) in TOKENS.items()
        for model, preset in MODELS.items()
    ),
    *(
        Case(f"train_step/{model}", "gpu.whole_step:measure", (MODELS[model],), 50.0, 180.0)
        for model in ("0.6B", "1.7B")
    ),
    *(
        Case(f"prompt/{name}", "gpu.whole_step:measure", (MODELS["0.6B"], tokens, way), seconds, 240.0)
        for name, tokens, way, seconds in (
            ("2k", 2_048, "", 25.0),
            ("2k/shared", 2_048, "shared", 65.0),
            ("8k", 8_192, "", 75.0),
            ("8k/shared", 8_192, "shared", 135.0),
        )
    ),
    Case("grad_step/30B-A3B/8k", "gpu.training_speed:grad_step", (EXPERTS, 8192), 90.0, 300.0),
    *(
        Case(f"peer/{model}/{count}", "gpu.peer:grad_step", (MODELS[model], TOKENS[count][0]), 30.0, 120.0, "torch")
        for model, count in (("0.6B", "8k"), ("1.7B", "8k"), ("4B", "8k"), ("0.6B", "64k"), ("1.7B", "64k"))
    ),
    Case("decode", "gpu.decode_step:measure", ("Qwen3-14B",), 30.0, 120.0, "decode"),
    *ENGINE_CASES,
)


def chosen(names: Sequence[str], known: Sequence[Case] = CASES) -> list[Case]:
    """Returns the cases with these names, or of these groups; all if there is no name.

    Raises:
      ConfigError: there is no such case; the message offers the nearest name.
    """
    for name in names:
        if not any(f"{case.name}/".startswith(f"{name}/") for case in known):
            groups = list(dict.fromkeys(case.name.partition("/")[0] for case in known))
            near = difflib.get_close_matches(name, [*groups, *(case.name for case in known)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise protocols.ConfigError(f"--cases: {name!r} is no case and no group of {', '.join(groups)}{hint}")
    return [case for case in known if not names or any(f"{case.name}/".startswith(f"{name}/") for name in names)]
