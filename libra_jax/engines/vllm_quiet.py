"""Imported before vLLM itself, whose modules warn about the machine as they are imported: on the terminal, twice."""

import logging
import os

os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
logging.getLogger("vllm").setLevel(logging.ERROR)
