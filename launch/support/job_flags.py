"""Defines the flags that the job launchers share, each with one name and one meaning, and the run that they describe.

launch/slurm.py, launch/kubernetes.py and launch/tpu.py all have --config, --plan, --workdir and --dry_run. Of the
other flags, each launcher has those that its cluster uses.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from support import cli, host_sizes, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import config as config_lib
from libra_jax.build import changes, preflight
from libra_jax.cluster import resolved_run
from libra_jax.models.hf import hub
from libra_jax.protocols import ConfigError, DataError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file, which all hosts have, too.", lock_config=True
)
PLAN = flags.DEFINE_string("plan", None, "Plan of launch/plan.py to lay the run out by, which all hosts have, too.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, which all hosts see; default <config>-<its hash>.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would be submitted; submit nothing.")

_HIDDEN = ("environment", "secret", "setup")
"""Flags whose values may be secrets: messages do not show them."""

_ALLOW_CHANGES = flags.DEFINE_string(
    "allow_changes", "", "Settings in which a run may go on otherwise than it began; see launch/train.py."
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@[A-Za-z0-9+._-]+:[0-9a-fA-F]{{32,}})?"
)
"""Pattern of an image's registry, name, tag and digest (github.com/distribution/reference)."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The submitted run.

    Attributes:
      config: the driver's config, with the job's own Ray as its cluster; not validated yet.
      arguments: arguments of launch/train.py, without the workdir.
      allow_changes: names of --allow_changes, for `workdirs.open_workdir`.
    """

    config: config_lib.RunConfig
    arguments: tuple[str, ...]
    allow_changes: tuple[str, ...] = ()

    @functools.cached_property
    def resolved(self) -> resolved_run.ResolvedRun:
        """The run; if it names its model by a Hugging Face id, with the folder of the config.json in the hub."""
        config = self.config
        try:
            config = hub.with_model(config)
        except DataError as error:
            print(f"note: {error}; what depends on the model's shape was not checked.", file=sys.stderr)
        return resolved_run.resolve(config, need_weights=False)

    def validate(self) -> None:
        """Checks the config as far as this machine can. The hosts may have a model that is missing here.

        Raises:
          LibraError: one sentence that names the field or file.
        """
        preflight.validate(self.resolved.config, need_weights=False)

    def host_size(self) -> host_sizes.HostSize:
        """Estimates what each host needs. Prints a line if accelerators would stay idle, or the memory is a guess.

        Raises:
          LibraError: the model's config.json cannot be read.
        """
        if unlikely := host_sizes.unlikely(self.resolved):
            print(f"warning: {unlikely}.", file=sys.stderr)
        if self.resolved.shape is None and not flags.FLAGS["memory"].value:
            print("note: without the model's shape, the memory of a host is a guess; give --memory.", file=sys.stderr)
        return host_sizes.estimate(self.resolved)


def grace() -> flags.FlagHolder[int]:
    """Defines --grace, in seconds; `check_grace` checks it."""
    text = "Seconds from when the run is told to end until it is killed; at least config.deadlines.grace."
    return flags.DEFINE_integer("grace", 120, text, lower_bound=1, upper_bound=65_535)


def retries(not_counted: str) -> flags.FlagHolder[int]:
    """Defines --retries; the help text adds which restarts do not count."""
    text = f"Times that a run is started again after it lost what it needs{not_counted}."
    return flags.DEFINE_integer("retries", 3, text, lower_bound=0)


def image() -> flags.FlagHolder[str]:
    """Defines --image; `check_image` checks it."""
    return flags.DEFINE_string("image", "", "Container image that each host's part runs in.")


def cpus_per_host(otherwise: str) -> flags.FlagHolder[int]:
    """Defines --cpus_per_host; the help text says what 0 means."""
    return flags.DEFINE_integer("cpus_per_host", 0, f"Cores of each host; 0: {otherwise}.", lower_bound=0)


def telemetry_key(config: config_lib.RunConfig) -> str:
    """Returns the variable whose secret the run's telemetry needs; empty if it needs none."""
    return "WANDB_API_KEY" if config.telemetry.wandb_project and os.environ.get("WANDB_MODE") != "offline" else ""


def setup() -> flags.FlagHolder[str]:
    """Defines --setup; `check_text` checks it."""
    return flags.DEFINE_string("setup", "", "Shell line before the run on each host, like 'module load cuda'.")


def environment(by_name: str) -> flags.FlagHolder[list[str]]:
    """Defines --environment, which `variables` reads; the help text says what a name without a value means."""
    return flags.DEFINE_multi_string("environment", [], f"NAME=VALUE{by_name}; may be repeated.")


def output() -> flags.FlagHolder[str | None]:
    """Defines --output, which `show` writes."""
    return flags.DEFINE_string(
        "output", None, "File to write what is submitted to, too; a dry run prints nothing then."
    )


def run() -> Run:
    """Returns the run that --config, the settings beside it and --plan describe.

    Raises:
      ConfigError: a setting is wrong, looks like a secret, has several lines, or has the run join another cluster.
      DataError: the plan cannot be read.
    """
    _check_lines()
    flag = flags.FLAGS["config"]
    given = overrides.arguments(flag)  # first, because another error could show a secret
    address = flag.value.cluster.address
    if address not in ("", "auto"):
        raise ConfigError(
            f"config.cluster.address: {address!r} is another cluster's, and a job starts a Ray of "
            "its own; leave it empty"
        )
    # The job starts a Ray of its own, which the driver finds by itself.
    ours = {"backend": "ray", "address": "auto"}
    settings = [argument for argument in given if not argument.startswith("--config.cluster.backend=")]
    settings += [f"--config.cluster.{name}={value}" for name, value in ours.items()]
    further = [f"--plan={PLAN.value}"] if PLAN.value is not None else []
    allowed = changes.allowed_names(_ALLOW_CHANGES.value)
    if allowed:
        further.append(f"--allow_changes={_ALLOW_CHANGES.value}")
    return Run(
        overrides.config(flag, PLAN.value, ours),
        (f"--config={config_flags.get_config_filename(flag)}", *sorted(settings), *further),
        allowed,
    )


def _check_lines() -> None:
    """Refuses flags that hold a line break or another control character.

    A line of a job's script ends at a line break, quoted or not: sbatch reads its options line by line.

    Raises:
      ConfigError: a flag holds a control character.
    """
    found = flags.FLAGS.flag_values_dict() | {"config": config_flags.get_config_filename(flags.FLAGS["config"])}
    for name, value in found.items():
        if name.startswith("config."):  # `overrides.arguments` checks these, and their secrets first
            continue
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and any(ord(character) < 32 or ord(character) == 127 for character in text):
                shown = f"{text[:40]!r}" if name not in _HIDDEN else "its value"
                raise ConfigError(f"--{name}: {shown} holds a line break or control character; write it on one line")
    if not str(Path.cwd()).isprintable():
        raise ConfigError(f"{str(Path.cwd())!r}: a job cannot be submitted from a folder with a line break in its name")


def check_grace(seconds: int, config: config_lib.RunConfig) -> None:
    """Raises ConfigError if the run would be killed before it can save its checkpoint."""
    if seconds < config.deadlines.grace:
        raise ConfigError(
            f"--grace={seconds}: told to stop, the run takes up to {config.deadlines.grace:g} s "
            "(config.deadlines.grace); give --grace more, or the run less"
        )


def check_image(image: str, platform: str = "cpu") -> None:
    """Raises ConfigError unless this names a container image; a missing one is offered for `trainer.platform`."""
    if not image:
        recipe = "third_party/Dockerfile.cuda" if platform == "cuda" else "third_party/Dockerfile"
        raise ConfigError(f"--image: name the container image of the run; {recipe} makes one")
    if not _REFERENCE.fullmatch(image):
        raise ConfigError(
            f"--image={image}: is no name of an image; write it like registry.example/team/libra-jax:1, all but the "
            "registry and the tag in small letters"
        )


def check_text(flag: str, text: str, instead: str) -> None:
    """Raises ConfigError if a shell's text holds a secret in the clear; `instead` is the advice."""
    overrides.refuse_secret(f"--{flag}", "it", text, instead)
    for name, value in re.findall(r"([\w.-]+)=([^\s,;]+)", text):
        if not value.lstrip("'\"").startswith(("$", "`")):  # these refer to a value that is elsewhere
            overrides.refuse_secret(f"--{flag}", name.lstrip("-"), value.strip("'\""), instead)


def variables(lines: Sequence[str], instead: str) -> tuple[dict[str, str], list[str]]:
    """Reads --environment: returns the variables with values, and the names of those without.

    Args:
      lines: the flag's values.
      instead: advice for a secret; {name} stands for the variable.

    Raises:
      ConfigError: a name is not a variable's, or a value looks like a secret.
    """
    values, names = {}, []
    for line in lines:
        name, separator, value = line.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--environment={name}: is no name of a variable; write NAME=VALUE")
        if separator:
            overrides.refuse_secret("--environment", name, value, instead.format(name=name))
            values[name] = value
        else:
            names.append(name)
    return values, names


def show(text: str, file: str | None) -> None:
    """Writes the submitted text to the file of --output. A dry run without --output prints the text."""
    if file:
        cli.check_output(Path(file))
        Path(file).write_text(text)
    elif DRY_RUN.value:
        print(text, end="")
