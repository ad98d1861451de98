"""Writes report.html from the files of a run, even of an interrupted one.

python launch/report.py runs/quickstart-0123abcd
"""

from __future__ import annotations

from pathlib import Path

from support import cli

from absl import flags

from libra_jax.telemetry.report import report

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the flag's name may be left out.", required=True)


def main() -> None:
    print(report.write_report(Path(_WORKDIR.value)))


if __name__ == "__main__":
    cli.run(main, positional="workdir")
