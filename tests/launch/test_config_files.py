"""A user's config file that fails, loops or returns something else: one sentence with file and line."""

import subprocess
import sys

from support import cli, config_files

import pytest
import scripts
from absl import flags
from ml_collections import config_flags

from libra_jax import config as config_lib
from libra_jax.config import listing

FILE = """from libra_jax import config as config_lib

def helper():
    {code}

def get_config():
    helper()
    return config_lib.RunConfig()
"""


def error_of(path) -> BaseException:
    """What the evaluation of a config file ends in, as the flags' library passes it on."""
    values, arguments = flags.FlagValues(), ["script", f"--config={path}"]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    try:
        values(arguments)
        str(values.config.name)
    except BaseException as error:
        return error
    raise AssertionError("the config file was read")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("undefined", "NameError: name 'undefined' is not defined"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("assert False, 'an even\\n count'", "AssertionError: an even count"),
        ("[][1]", "IndexError: list index out of range"),
        ("raise NotImplementedError", "NotImplementedError"),
        ("helper()", "RecursionError: maximum recursion depth exceeded"),
        ("raise TypeError('wrapped')", "TypeError: wrapped"),
        ("open('/nowhere/at/all')", "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("{}['a']", "KeyError: 'a'"),
    ],
)
def test_an_error_in_a_config_file_is_told_with_its_line(tmp_path, code, expected):
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(code=code))
    assert config_files.sentence(error_of(file), str(file)) == f"--config={file}, line 4: {expected}"


@pytest.mark.parametrize(
    ("code", "offered"),
    [
        ("config_lib.RunConfig().rolout.slots = 1", "; did you mean rollout?"),
        ("config_lib.RolloutConfig(max_contxt=1)", "; did you mean max_context?"),
        ("config_lib.RunConfig(learning_rat=1)", "; its fields are algorithm, checkpoint"),
        ("config_lib.RollotConfig()", "; did you mean RolloutConfig?"),
        ("config_lib.RunConfig().max_context = 1", "; did you mean config.rollout.max_context?"),
        ("config_lib.TaskConfig().max_context = 1", "; did you mean config.rollout.max_context?"),
        (
            "config_lib.parse(config_lib.RunConfig, {'trainer': {'group_size': 4}})",
            "; did you mean config.coordinator.group_",
        ),
    ],
)
def test_a_mistyped_name_of_a_config_file_is_offered_the_nearest(tmp_path, code, offered):
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(code=code))
    assert offered in config_files.sentence(error_of(file), str(file))


def test_an_error_that_is_not_the_config_files_has_no_sentence(tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert config_files.sentence(caught.value, str(tmp_path / "mine.py")) is None


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        ("train.py", "undefined", "mine.py, line 2: NameError: name 'undefined' is not defined"),
        ("simulate.py", "raise SystemExit(0)", "mine.py, line 2: SystemExit: 0"),
        ("slurm.py", "return {}", "mine.py: get_config() returned a dict; it has to return"),
    ],
)
def test_a_script_answers_a_broken_config_file_in_a_sentence(tmp_path, script, code, expected):
    (tmp_path / "mine.py").write_text(f"def get_config():\n    {code}\n")
    result = scripts.run_forked(script, f"--config={tmp_path / 'mine.py'}")
    scripts.assert_one_sentence(result, f"error: --config={tmp_path}/{expected}")
    assert result.returncode == 2


LOOPS = """
import sys
sys.path.insert(0, "launch")
from support import config_files
with config_files.watched(sys.argv[1]):
    exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"))
"""


def test_a_config_that_loops_is_told_of_and_ended_in_a_sentence(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("while True:\n    try:\n        sum(range(99))\n    except BaseException:\n        pass\n")
    result = subprocess.run(
        [sys.executable, "-c", LOOPS, str(file)],
        cwd=scripts.ROOT,
        env={"PYTHONPATH": str(scripts.ROOT), config_files.LIMIT_VARIABLE: "0.3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    notice, error = result.stderr.splitlines()
    assert notice.startswith(f"{file} is still being evaluated, at line ")
    assert error.startswith(f"error: --config={file}: did not return within 0.3 s, at line ")
    assert result.returncode == 2


def test_settings_are_listed_with_default_and_meaning():
    shown = listing.listing(config_lib.RunConfig)
    assert "--config.optimizer.learning_rate=0.001\n      peak learning rate\n      Must not be negative.\n" in shown
    assert "\n      One of none, truncated, masked.\n" in shown
    assert "--config.trainer.restarts=3\n      Times that a lost trainer is restarted" in shown, (
        "comments above a field"
    )
    assert "--config.sandbox.memory_mib=512\n      MiB of memory of all processes together" in shown, "a base class"
    names = [line for line in shown.splitlines() if line.startswith("--config.")]
    assert len(names) > 150


def test_settings_are_found_by_a_word_of_their_name_or_meaning():
    found = listing.listing(config_lib.RunConfig, "Learning_Rate").splitlines()
    assert [line for line in found if line.startswith("--")] == [
        "--config.critic.learning_rate=0.001",
        "--config.optimizer.learning_rate=0.001",
        "--config.warm_start.learning_rate=0.003",
    ]
    named = listing.listing(config_lib.RunConfig, "rollout.max_context").splitlines()
    assert named[0].startswith("--config.rollout.max_context=")
    assert sum(line.startswith("--") for line in named) > 1
    assert "--config.trainer.pack=True" in listing.listing(config_lib.RunConfig, "segment ids")


def test_the_help_shows_the_values_of_the_named_config():
    result = scripts.run_forked("train.py", "--config=configs/quickstart.py", "--config.steps=7", "--config_help=steps")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Values of configs/quickstart.py; ")
    assert "--config.steps=7   # default: 100" in lines
    assert "--config.optimizer.warmup_steps=5   # default: 0" in lines
    assert "--config.trainer.max_skipped_steps=10" in lines
    unnamed = scripts.run_forked("train.py", "--config_help=steps").stdout.splitlines()
    assert unnamed[0] == "--config.steps=100"
    refused = scripts.run_forked("train.py", "--config=configs/none.py", "--config_help")
    scripts.assert_one_sentence(refused, "--config=configs/none.py: no such config file")


def test_repeated_flags_of_a_tuple_add_up_and_replace_the_files():
    twice = ("--config.tools.use=calculator", "--config.tools.use=search")
    result = scripts.run_forked("train.py", "--config=configs/python_cpu.py", *twice, "--config_help=tools.use")
    assert "--config.tools.use=('calculator', 'search')   # default: ()" in result.stdout.splitlines()
    result = scripts.run_forked("train.py", "--config=configs/python_cpu.py", "--config.tools.use=a:b,c:d", "--dry_run")
    written = """--config.tools.use="('a:b','c:d')", or give the flag once for each value"""
    scripts.assert_one_sentence(result, "--config.tools.use: 'a:b,c:d' is no tuple; write", written)


def test_the_help_hides_secrets_of_the_config(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from libra_jax import config as config_lib\n"
        "def get_config():\n"
        "    made = config_lib.RunConfig()\n"
        "    made.task.arguments = {'api_key': 'swordfish'}\n"
        "    return made\n"
    )
    result = scripts.run_forked("train.py", f"--config={file}", "--config_help=task.arguments")
    assert result.returncode == 0, result.stderr
    assert "api_key" in result.stdout
    assert "swordfish" not in result.stdout


def test_help_names_the_flag_that_lists_settings():
    assert "--config_help: List the settings" in scripts.run_forked("simulate.py", "--helpfull").stdout
    result = scripts.run_forked("train.py", "--config_help=nosuchword")
    assert (result.returncode, "no setting's name" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("steps = 'ten'", "RunConfig.steps: must be of type int, not 'ten'; for example 100"),
        (
            "optimizer.learning_rate = '1e-4'",
            "OptimizerConfig.learning_rate: must be of type float, not '1e-4'; for example 0.001",
        ),
        (
            "optimizer = {}",
            "RunConfig.optimizer: must be of type OptimizerConfig, not {}; for example OptimizerConfig()",
        ),
        ("tools.use = 'python'", "ToolsConfig.use: must be a tuple, not 'python'; for example ('first', 'second')"),
        ("task.arguments = 3", "TaskConfig.arguments: must be a mapping, not 3; for example {'name': 1}"),
    ],
)
def test_a_setting_of_the_wrong_type_is_told_with_its_line(tmp_path, setting, expected):
    file = tmp_path / "mine.py"
    file.write_text(
        "from libra_jax import config as config_lib\n"
        f"def get_config():\n    c = config_lib.RunConfig()\n    c.{setting}\n"
    )
    assert config_files.sentence(error_of(file), str(file)) == f"--config={file}, line 4: {expected}"


def test_a_setting_takes_the_type_of_its_field():
    run = config_lib.RunConfig()
    run.optimizer.learning_rate, run.tools.use = 1, ["python"]
    assert isinstance(run.optimizer.learning_rate, float)
    assert run.tools.use == ("python",)


def test_an_empty_mapping_clears_what_a_config_file_gives():
    for field, emptied in (("name=x", False), ("task.environment_arguments={}", True)):
        read = cli.read_config(config_lib.RunConfig, "configs/questions.py", [f"--config.{field}"])
        assert (not read.task.environment_arguments) is emptied


def test_a_config_file_without_return_is_answered_in_one_sentence_alone(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    pass\n")
    result = scripts.run_forked("train.py", f"--config={tmp_path / 'mine.py'}")
    assert result.stderr.startswith(
        f"error: --config={tmp_path}/mine.py: get_config() returned nothing; it has to return"
    )
    assert result.stderr.count("\n") == 1
