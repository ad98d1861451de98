"""Silences vLLM's warnings about the machine. Import it before vLLM, whose modules warn at import."""

import logging
import os

os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
logging.getLogger("vllm").setLevel(logging.ERROR)
