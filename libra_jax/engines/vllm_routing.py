"""Lets vLLM's CPU runner return the experts of every token (routing replay).

vLLM 0.32 returns them from its newer model runner only (`v1/worker/gpu/model_runner.py`), which needs Triton, so not on
CPU. The runner here feeds vLLM's own collector of experts from the CPU runner. The collector keeps the
experts of cached prefixes, too. Nothing imported here reaches JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from vllm.distributed.aux_output_connector import worker as collector_lib
from vllm.v1 import outputs
from vllm.v1.core.sched import output as scheduling
from vllm.v1.worker import cpu_model_runner


@dataclass(frozen=True)
class StepRequests:
    """The requests of one step, as the collector reads them.

    Attributes:
      req_ids: the requests.
      query_start_loc_np: [requests + 1] first row of each request in the step.
      num_computed_tokens_np: [requests] tokens of each request that earlier steps computed.
    """

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray


class ModelRunner(cpu_model_runner.CPUModelRunner):
    """vLLM's CPU runner, with the experts of a step's tokens among its outputs."""

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        """Also binds the collector to the routers, as vLLM's newer runner does at this point."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
        if not is_profiling:
            self._collector = collector_lib.get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: scheduling.SchedulerOutput, *arguments: Any) -> Any:
        """Runs the model on a step's tokens, and keeps the experts that they took."""
        self._collector.begin_step(scheduler_output.aux_output_connector_metadata)
        ended = super().execute_model(scheduler_output, *arguments)
        if ended is None:  # `sample_tokens` follows
            batch = self.input_batch
            count = len(batch.req_ids)
            # Copies: the arrays are the runner's own, and `sample_tokens` changes them.
            step = StepRequests(
                list(batch.req_ids),
                self.query_start_loc.np[: count + 1].copy(),
                batch.num_computed_tokens_cpu[:count].copy(),
            )
            drafted = scheduler_output.scheduled_spec_decode_tokens
            self._drafted = [len(drafted.get(name, ())) for name in step.req_ids]
            self._taken = self._collector.prepare_output(cast(Any, step))
        return ended

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples the step's tokens, and adds the experts to the output."""
        output = super().sample_tokens(grammar_output)
        if self._taken is not None:
            assert isinstance(output, outputs.ModelRunnerOutput)  # vLLM schedules nothing ahead on CPU
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            # Of d drafted tokens and one more, the refused ones were computed in vain.
            rejected = np.where(sampled > 0, np.array(self._drafted) + 1 - sampled, 0)
            self._taken.enqueue_cpu_copy(sampled, rejected)
            output.aux_output_connector_output = self._taken.process_output()
        return output
