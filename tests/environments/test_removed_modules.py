"""Configs that name modules which are gone."""

import importlib
import importlib.util
import pathlib
import re

import pytest

import libra_jax
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import factories
from libra_jax.utils import resolving

ROOM = "libra_jax.agents.environments.verifiers"
ARGUMENTS = {"name": "wordle", "arguments": {"use_think": True}}


def test_environments_of_verifiers_are_refused_with_what_to_use_instead():
    task = config_lib.TaskConfig(
        source=f"{ROOM}:task_source",
        environment=f"{ROOM}:environment",
        arguments=ARGUMENTS,
        environment_arguments=ARGUMENTS,
    )
    why = r"release 0\.4 of verifiers removed .* as harnesses now .*'libra_jax\.examples\.outside\.verifiers_v1:solve'"
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.source: .*{why}"):
        factories.task_source(task, seed=0)
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.environment: .*{why}"):
        factories.environment_factory(task)()


def test_a_tool_whose_module_has_moved_is_refused_with_its_present_name():
    task = config_lib.TaskConfig(source="libra_jax.agents.tools.calculator:Calculator")
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.source: .*moved; name it 'calculator', or "):
        factories.task_source(task, seed=0)


# What the shipped configs, the guides and the notebook named before the rooms were divided.
FORMER = [
    "libra_jax.agents.calculator:task_source",
    "libra_jax.agents.datasets:task_source",
    "libra_jax.agents.question:environment",
    "libra_jax.agents.answers:number",
    "libra_jax.agents.environments.dialogue:Dialogue",
    "libra_jax.agents.environments.acquaintances:corpus",
    "libra_jax.agents.environments.gym_text:environment",
    "libra_jax.agents.environments.harness:environment",
    "libra_jax.agents.environments.harness.harbor:environment",
    "libra_jax.agents.environments.harness.harbor_tasks:task_source",
    "libra_jax.agents.environments.harness.openai_loop:agent",
    "libra_jax.agents.environments.integers:task_source",
    "libra_jax.agents.environments.math:environment",
    "libra_jax.agents.environments.openenv:environment",
    "libra_jax.agents.environments.reasoning_gym:environment",
    "libra_jax.agents.environments.repo_repair:environment",
    "libra_jax.agents.environments.search_qa:environment",
    "libra_jax.agents.environments.time_zones:task_source",
    "libra_jax.agents.outside.agents_sdk:solve",
    "libra_jax.agents.repair.planted:task_source",
    "libra_jax.agents.wire:status",
]


@pytest.mark.parametrize("former", FORMER)
def test_a_name_of_a_divided_room_is_refused_with_the_one_that_works(former):
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.source: .* has moved; name it \S+$") as refusal:
        factories.task_source(config_lib.TaskConfig(source=former), seed=0)
    module, _, attribute = re.search(r"name it (\S+)$", str(refusal.value))[1].partition(":")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("former", ["libra_jax.agents.calculater", "libra_jax.agents.tools.tokenizer"])
def test_no_name_is_offered_that_does_not_exist(former):
    with pytest.raises(protocols.ConfigError, match=r"there is no module 'libra_jax\.agents") as refusal:
        factories.task_source(config_lib.TaskConfig(source=f"{former}:nothing"), seed=0)
    assert "has moved" not in str(refusal.value)


# Every module before the rooms were divided that is not where it was: (former room, present room) -> names.
MOVES = {
    ("", "utils"): "background_tasks checksums deadlines machine parent_death scratch turns user_code",
    ("agents", "chat"): (
        "chat_format control_tokens endpoints hugging_face messages output_parsers thoughts tokenizers"
    ),
    ("agents", "environments"): "datasets published question",
    ("agents", "examples"): "calculator",
    ("agents", "rewards"): "answers teacher",
    ("agents", "rollouts"): "factories harness_loop lines loop outputs progress rehearsal samples session splits",
    ("agents", "tools"): "arithmetic",
    ("agents", "utils"): "resolving tables",
    ("agents.environments", "environments"): (
        "dialogue episodes gym_text math openenv reasoning_gym repo_repair search_qa verifier verifier_worker"
    ),
    ("agents.environments", "examples"): "acquaintances integers time_zones",
    ("agents.environments.harness", "harness"): "factory harbor harbor_tasks jobs openai_loop private_view scoring",
    ("agents.environments.harness", "harness.processes"): (
        "callables child commands confined inside keeper processes program workspace"
    ),
    ("agents.outside", "examples.outside"): "agents_sdk mini_swe openenv_client verifiers_v1",
    ("agents.repair", "examples"): "planted",
    ("agents.repair", "rewards.repair"): "caller calls grading outcomes runner snapshots suites unittest_report",
    ("agents.rewards", "rewards"): "actors composition judge scoring trial",
    ("agents.sandbox", "tools.sandbox"): "backends children limits pool seccomp supervisor usage worker",
    ("agents.tools", "chat"): "formats",
    ("agents.tools", "tools"): "bm25 mcp_connection mcp_server schemas search toolbox toolkit workspace",
    ("elastic", "hybrid"): "hybrid pool switching training_sides transitions worker_shares",
    ("gateway", "harness.gateway"): (
        "answers anthropic_messages app errors exchanges fields front fronts openai_chat openai_responses "
        "outputs response_events server sessions"
    ),
    ("loops", "rollouts"): "channel mirror moves rollouts streams",
    ("models", "models.adapters"): "adapters lora peft",
    ("models", "models.attention"): "attention context_attention cudnn_attention splash_attention",
    ("models", "models.experts"): "expert_groups expert_rows expert_tiles experts grouped_products router",
    ("models", "models.hf"): "gather hf hf_names hub weight_files",
    ("planning", "models"): "rows",
    ("planning", "planning.compiled"): "compiled hlo programs",
    ("planning", "planning.costs"): "calibration costs hardware measured_costs memory profiles request_costs",
    ("planning", "planning.forecast"): "confusion forecast meshes pipeline serving",
    ("planning", "planning.search"): "partition plans search",
    ("runs", "build"): (
        "api changes chat_formats cpu_rows dry_run evaluating fitting huge_pages inventory "
        "loop_worker objects observing planned preflight records serving supervised wiring workdirs "
        "worker_specs"
    ),
    ("runs", "telemetry.report"): "curve",
    ("scheduling", "scheduling.prediction"): ("evidence learning paths prediction_quality prefix_tree"),
    ("scheduling", "scheduling.rivals"): "authors baselines heddle known_lengths",
    ("telemetry", "telemetry.report"): "page pool_report report timeline tool_report",
    ("training", "data"): (
        "batch batch_advantages dividing packing row_places segments sequences shared_prompts trees world"
    ),
}
RENAMED = {
    "agents": "rollouts",
    "agents.deadlines": "utils.deadlines",
    "agents.environments": "environments",
    "agents.environments.harness": "harness",
    "agents.guarded": "rollouts.deadline_environment",
    "agents.outside": "examples.outside",
    "agents.repair": "rewards.repair",
    "agents.rewards": "rewards",
    "agents.sandbox": "tools.sandbox",
    "agents.tools": "tools",
    "agents.wire": "rollouts.tool_results",
    "clients": "utils.typed_clients",
    "elastic": "hybrid",
    "gateway": "harness.gateway",
    "loops": "rollouts",
    "loops.client": "rollouts.loop_worker_client",
    "loops.worker": "rollouts.loop_worker",
    "planning.least": "models.communication_bounds",
    "planning.pools": "planning.forecast.degree_queues",
    "runs": "build",
    "telemetry.sections": "telemetry.report.run_report",
    "training.columns": "data.packing",
    "weights.sync": "coordinator.weight_sync",
}


def present_names() -> dict[str, str]:
    """Every former name of a module, and its present one."""
    names = {
        f"{room}.{name}".lstrip("."): f"{present}.{name}"
        for (room, present), modules in MOVES.items()
        for name in modules.split()
    }
    return {f"libra_jax.{former}": f"libra_jax.{present}" for former, present in {**names, **RENAMED}.items()}


def test_every_former_module_leads_to_the_present_one():
    names = present_names()
    assert len(names) == 229
    assert {former: resolving._present_name(former) for former in names} == names
    assert all(importlib.util.find_spec(present) for present in names.values())


def test_no_present_module_is_said_to_have_moved():
    root = pathlib.Path(libra_jax.__file__).parent
    for file in root.rglob("*.py"):
        module = ".".join(("libra_jax", *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        # A former module's name may be a room's now. That room's own file is empty.
        offers = ["", f"{module}.{module.rpartition('.')[2]}"] if file.name == "__init__.py" else [""]
        assert resolving._present_name(module) in offers
    assert resolving._present_name("scratch") == ""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "from libra_jax.agents import answers",
            r"libra_jax\.agents, which has moved to libra_jax\.rollouts, .*libra_jax\.rewards, .*architecture\.md$",
        ),
        ("import libra_jax.user_code", r"libra_jax\.user_code, which has moved to libra_jax\.utils\.user_code; see "),
        ("import libra_jax.nothing", r"libra_jax\.nothing, which does not exist; see docs/concepts/architecture\.md$"),
        ("import no_such_package", r"no_such_package, which is not installed$"),
    ],
)
def test_user_code_that_imports_a_former_room_is_told_where_it_is(tmp_path, monkeypatch, line, why):
    name = "imports_" + re.sub(r"\W", "_", line)
    (tmp_path / f"{name}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.source: {name} needs the module {why}"):
        resolving.resolve(f"{name}:factory", "task.source")
