"""vLLM's engine arguments that `rollout.engine_arguments` takes, and the reason for each that it refuses.

Every field of `AsyncEngineArgs` of the pinned vLLM (0.32) is in one of three tables: `ALLOWED`, `OWNED` or `REFUSED`. A
test reads vLLM's fields, so that an upgrade names the new ones. vLLM checks the values when an engine starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from libra_jax.config.checks import check

FIELD = "rollout.engine_arguments"

_CACHE = """
enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval block_size num_gpu_blocks_override
watermark kv_offloading_size kv_offloading_backend disable_hybrid_kv_cache_manager disable_cascade_attn"""

_BATCHES = """
enable_chunked_prefill max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold
long_prefill_token_threshold_adaptive prefill_schedule_interval scheduler_reserve_full_isl async_scheduling
enable_batch_sharded_sampling"""

_SPECULATION = "speculative_config per_request_spec_decode_metrics"

_QUANTISATION = """
quantization quantization_config allow_deprecated_quantization kv_cache_dtype kv_cache_dtype_skip_layers"""

_KERNELS = """
compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
attention_config attention_backend kernel_config linear_backend ir_op_priority enable_flashinfer_autotune
disable_custom_all_reduce use_fp64_gumbel jit_monitor_mode jit_monitor_verbose"""

_OPERATION = """
distributed_timeout_seconds cpu_distributed_timeout_seconds enable_cumem_allocator enable_nccl_comm_suspend
sleep_mode_offload_cudagraph profiler_config enable_layerwise_nvtx_tracing otlp_traces_endpoint
fail_on_environ_validation"""

ALLOWED = frozenset(" ".join((_CACHE, _BATCHES, _SPECULATION, _QUANTISATION, _KERNELS, _OPERATION)).split())
"""Arguments that go to vLLM. None of them changes the distribution of tokens or its log-probabilities, beyond the
rounding of other kernels; quantisation does, and needs an importance correction."""

OWNED = {
    "model": "config.model.path or config.model.preset",
    "load_format": "weight sync, which brings every weight",
    "skip_tokenizer_init": "the log-prob contract: tokens in, tokens out",
    "tokenizer": "config.task.tokenizer",
    "dtype": "config.rollout.dtype",
    "seed": "config.seed",
    "max_model_len": "config.rollout.max_context",
    "max_num_seqs": "config.rollout.slots",
    "tensor_parallel_size": "config.rollout.tensor_parallel",
    "enforce_eager": "config.rollout.enforce_eager",
    "stream_interval": "config.rollout.stream_interval",
    "gpu_memory_utilization": "config.rollout.gpu_memory_fraction",
    "kv_cache_memory_bytes": "config.rollout.kv_cache_gib on CPU, and config.rollout.gpu_memory_fraction on CUDA",
    "weight_transfer_config": "config.rollout.transport",
    "enable_sleep_mode": "config.elastic.hybrid",
    "enable_return_routed_experts": "config.algorithm.routing_replay",
    "scheduling_policy": "config.scheduler.policy",
    "enable_fault_tolerance": "config.rollout.restarts",
    "fault_tolerance_config": "config.rollout.restarts",
    "shutdown_timeout": "config.deadlines.shutdown",
}
"""Arguments that Libra-JAX sets, and the setting that each one comes from."""

_REASONS = {
    "breaks the log-prob contract: the engine returns processed log-probs of temperature alone, which the trainer can "
    "compute again": """
logprobs_mode max_logprobs return_sampling_mask generation_config override_generation_config logits_processors
watermark_config enable_trace_replay structured_outputs_config reasoning_parser reasoning_parser_plugin
reasoning_config diffusion_config""",
    "would make the engine's model another one than the trainer's": """
model_weights hf_config_path hf_overrides model_class_overrides runner convert model_impl revision code_revision
config_format trust_remote_code additional_config io_processor_plugin pooler_config kv_sharing_fast_prefill
disable_sliding_window swa_bounded_replay""",
    "is about loading weights from disk, and weight sync brings every weight": """
download_dir hf_token safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
max_parallel_loading_workers model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location
sleep_preserve_parameter_names""",
    "keeps weights where a weight sync does not put them": """
offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
offload_params""",
    "is about adapters, which config.model.lora sets": """
enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
max_lora_cls_labels""",
    "divides an instance in another way than tensor parallelism; add instances to config.rollout.tensor_parallel": """
pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
dp_sync_interval disable_nccl_for_dp_synchronization enable_hc_sp""",
    "is about mixtures of experts, which the engine does not serve here": """
enable_expert_parallel enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size
enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config enable_eplb
expert_placement_strategy""",
    "is about layers that the supported architectures do not have": """
sparse_indexer_topk_backend engram_config mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
prefix_match_unit mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
gdn_prefill_backend kda_prefill_backend kda_decode_backend""",
    "is about images and sound, and the policy reads and writes tokens": """
allowed_local_media_path allowed_media_domains enable_prompt_embeds enable_shm_tensor_arena language_model_only
limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs
mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate
video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
enable_mm_processor_stats disable_chunked_mm_input ec_transfer_config ec_manager_config""",
    "is about text or a server, and the engine takes tokens and returns tokens": """
served_model_name tokenizer_mode tokenizer_revision tokens_only renderer_num_workers""",
    "replaces a part of vLLM that weight sync, pauses or admission rely on": """
worker_cls worker_extension_cls scheduler_cls distributed_executor_backend max_num_active_seqs max_num_queued_reqs
max_num_queued_tokens kv_events_config kv_transfer_config aux_output_config""",
    "places processes, which the cluster (config.cluster) and config.rollout.cores do": """
master_addr master_port nnodes node_rank numa_bind numa_bind_nodes numa_bind_cpus device_ids ray_workers_use_nsight
_api_process_count _api_process_rank""",
    "is about vLLM's own log and statistics, which are off; a run has metrics of its own": """
disable_log_stats aggregate_engine_logging logging_config log_level log_config_file enable_log_requests
show_hidden_metrics_for_version collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample
custom_histogram_buckets cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details""",
    "is a short form of speculative_config: write that": "spec_method spec_model spec_tokens",
}

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that no run may set, and why."""

SPECULATION_METHODS = ("ngram", "ngram_gpu", "suffix")
"""Ways to draft tokens without weights of their own. Weight sync would not reach a draft model, and an engine starts
from dummy weights."""

PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")
"""Values of `kv_cache_dtype` that quantise nothing."""


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses engine arguments that a run cannot set.

    Raises:
      ConfigError: an argument is unknown (the nearest name is offered), set by another setting, or refused; the message
        names the argument and the reason.
    """
    for name in arguments:
        known = name in ALLOWED or name in OWNED or name in REFUSED
        # Only names that a run may set are offered.
        near = difflib.get_close_matches(name, sorted(ALLOWED), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        check(known, FIELD, f"{name} is no argument of vLLM 0.32's AsyncEngineArgs{hint}")
        check(name not in OWNED, FIELD, f"{name} comes from {OWNED.get(name)}; set that, and leave it out here")
        check(name not in REFUSED, FIELD, f"{name} {REFUSED.get(name)}; leave it out")
    # vLLM 0.32's connector of LMCache has no `reset_cache`, and a pause takes that for success.
    check(
        arguments.get("kv_offloading_backend", "native") == "native",
        FIELD,
        "kv_offloading_backend must be native: LMCache would serve keys and values of old weights after a weight sync",
    )
    speculation = arguments.get("speculative_config")
    if speculation is None:
        return
    check(isinstance(speculation, Mapping), FIELD, "speculative_config must be a mapping: {'method': 'ngram', ...}")
    method = speculation.get("method")
    check(
        method in SPECULATION_METHODS,
        FIELD,
        f"speculative_config.method must be one of {', '.join(SPECULATION_METHODS)}, not {method!r}: a draft model "
        "would keep dummy weights, because weight sync brings the policy's alone",
    )
    check(
        speculation.get("rejection_sample_method", "standard") != "synthetic",
        FIELD,
        "speculative_config.rejection_sample_method=synthetic accepts tokens at a given rate, so the log-probs are not "
        "those of the sampled distribution; use standard",
    )
