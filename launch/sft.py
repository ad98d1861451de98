"""Fine-tunes a model on a table of chats, with the trainer and the packing of reinforcement learning.

  python launch/sft.py --config=configs/quickstart.py --data=chats.jsonl --output=runs/sft
  python launch/sft.py --config=my_config.py --config.model.path=Qwen/Qwen3-0.6B --data=chats.parquet --epochs=2

Each row of the table has a column `messages`: [{"role": "user", "content": "..."}, {"role": "assistant", ...}]. The
loss covers the assistant's tokens. The output folder gets metrics.jsonl and `model`, a Hugging Face directory.
"""

from __future__ import annotations

from pathlib import Path

from support import cli, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import protocols
from libra_jax.build import huge_pages, supervised

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file that names model, tokenizer, trainer and optimizer.", lock_config=True
)
_DATA = flags.DEFINE_string("data", None, "JSONL, Parquet or CSV file of chats, or a folder of such files.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the model and the metrics; default runs/sft-<config's name>.")
_EPOCHS = flags.DEFINE_float("epochs", 1.0, "Passes over the chats that are not held out.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Chats of a step.")
_HOLDOUT = flags.DEFINE_float("holdout", 0.05, "Share of the chats that are held out, from 0 to below 1.")


def main() -> None:
    config = overrides.config(flags.FLAGS["config"])
    huge_pages.restart(config)
    if _DATA.value is None:
        raise protocols.ConfigError("--data: names no table of chats; give a JSONL, Parquet or CSV file")
    output = Path(_OUTPUT.value or f"runs/sft-{config.name}")
    request = supervised.TuningRequest(_DATA.value, output, _EPOCHS.value, _BATCH_SIZE.value, _HOLDOUT.value)
    supervised.tune(config, request)
    print(f"wrote {output / supervised.MODEL} and {output / supervised.METRICS}")


if __name__ == "__main__":
    cli.run(main, interrupted="interrupted; no model was written. The same command begins again.", needs_config=True)
