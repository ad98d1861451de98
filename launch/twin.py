"""Predicts the second half of a recorded run from its first: a table, a JSON file and a picture.

  python launch/train.py --config=configs/twin.py --workdir=runs/twin    # records a run made for this
  python launch/twin.py --workdir=runs/twin

Costs are fitted to the first half of the steps of any finished run. The run's own coordinator, agent loop and
scheduler then replay the recorded rollouts on a virtual clock. The predicted step times are compared with the
measured ones.
"""

from __future__ import annotations

from pathlib import Path

from support import cli

from absl import flags

from libra_jax import protocols
from libra_jax.simulator import recording, twin

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the finished run.", required=True)
_OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file to write; the picture lies beside it, as .svg. Default: twin.json in the workdir."
)


def main() -> None:
    workdir = Path(_WORKDIR.value)
    output = workdir / "twin.json" if _OUTPUT.value is None else Path(_OUTPUT.value)
    recorded = recording.read(workdir)
    cli.check_output(output)
    made = twin.make(recorded)
    print(twin.table(made))
    picture = output.with_suffix(".svg")
    try:
        output.write_text(twin.to_json(made))
        twin.write_picture(made, picture, f"{recorded.config.name}: steps and their twin")
    except OSError as error:
        raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
    print(f"wrote {output} and {picture}")


if __name__ == "__main__":
    cli.run(main)
