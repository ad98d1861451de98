"""Counting what compiled programs do, against small programs whose counts follow from their sizes."""

import dataclasses

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import communication_bounds
from libra_jax.models import config as model_config
from libra_jax.planning.compiled import compiled, hlo, programs
from libra_jax.planning.costs import costs, hardware, memory

MESH = {"data": 2, "fsdp": 2, "tensor": 2, "context": 1}
SIZES = compiled.Sizes(MESH, vocabulary=1000, hidden=32, tokens=64, logits_chunk=16)

LOOP = """HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], f32[16,32], bf16[32,250])) -> (s32[], f32[16,32], bf16[32,250]) {
  %carry = (s32[], f32[16,32]{1,0}, bf16[32,250]{1,0}) parameter(0)
  %hidden = f32[16,32]{1,0} get-tuple-element(%carry), index=1
  %part = bf16[32,250]{1,0} get-tuple-element(%carry), index=2
  %head-start = (bf16[32,250]{1,0}, bf16[32,500]{1,0}) all-gather-start(%part), GROUPS, dimensions={1}
  %head = bf16[32,500]{1,0} all-gather-done(%head-start)
  %logits = f32[16,500]{1,0} dot(%hidden, %head), lhs_contracting_dims={1}
  %totals = f32[16]{0} all-reduce(%logits), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%condition (carry: (s32[], f32[16,32], bf16[32,250])) -> pred[] {
  %carry.1 = (s32[], f32[16,32]{1,0}, bf16[32,250]{1,0}) parameter(0)
  %index = s32[] get-tuple-element(%carry.1), index=0
  %limit = s32[]{:T(128)} constant(4)
  ROOT %less = pred[] compare(%index, %limit), direction=LT
}

ENTRY %main (p: (s32[], f32[16,32], bf16[32,250])) -> f32[] {
  %p = (s32[], f32[16,32]{1,0}, bf16[32,250]{1,0}) parameter(0)
  %loop = (s32[], f32[16,32]{1,0}, bf16[32,250]{1,0}) while(%p), condition=%condition, body=%bodyTRIPS
  %logits.1 = f32[64,500]{1,0} custom-call(%p), custom_call_target="x"
  ROOT %scalar = f32[] custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward"
}
"""
GROUPS = "replica_groups={{0,2},{4,6},{1,3},{5,7}}"
TRIPS = ', backend_config={"known_trip_count":{"n":"4"}}'


def counted(groups: str = GROUPS, trips: str = TRIPS) -> compiled.Counts:
    return compiled.count(LOOP.replace("GROUPS", groups).replace("TRIPS", trips), SIZES)


def test_a_loop_multiplies_its_collectives_and_products():
    counts = counted()
    assert counts.matmul_flops == 4 * 2 * 16 * 500 * 32
    total, gather = counts.collectives  # the largest first
    # Two devices: each sends its part once an iteration. 32 x 250 values of 2 bytes.
    assert (gather.kind, gather.axes, gather.executions, gather.wire_bytes) == ("all-gather", ("fsdp",), 4, 4 * 16_000)
    # The text's operand of the all-reduce is the logits: 16 x 500 x 4 bytes, twice halved over two devices.
    assert (total.kind, total.axes, total.wire_bytes) == ("all-reduce", ("tensor",), 4 * 32_000)
    assert (gather.span, total.span) == (3, 2)
    assert counts.attention_backward == 1
    assert counts.attention_forward == 0


# As XLA 0.10.2 writes it for TPU, with the kernel's metadata in lines of their own: a loop over a device's two rows.
SPLASH = """HloModule jit_f

%row (carry.2: (s32[])) -> (s32[]) {
  %carry.2 = (s32[]) parameter(0)
  %closed_call.1 = (f32[1024,128]{1,0}, bf16[16,PART,128]{2,1,0}) custom-call(%carry.2), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(f)/jvp(vmap(static_sparsity_splash))/splash_mha_fwd_residuals/while/body/pallas_call"}
  %closed_call.2 = (f32[1024,128]{1,0}, bf16[16,PART,128]{2,1,0}) custom-call(%carry.2), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q_dkv\\": 1024}"
}}, metadata={op_name="jit(f)/transpose(jvp(vmap(static_sparsity_splash)))/splash_mha_dkv_no_residuals/while/body/pallas_call"}
  ROOT %next = (s32[]) tuple(%carry.2)
}

%condition (carry.1: (s32[])) -> pred[] {
  %carry.1 = (s32[]) parameter(0)
  %index = s32[] get-tuple-element(%carry.1), index=0
  %limit = s32[]{:T(128)} constant(2)
  ROOT %less = pred[] compare(%index, %limit), direction=LT
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  ROOT %loop = (s32[]) while(%p), condition=%condition, body=%row
}
"""  # noqa: E501


def test_attention_on_a_tpu_counts_by_the_rows_that_it_computes():
    counts = compiled.count(SPLASH.replace("PART", str(SIZES.tokens // 2)), SIZES)
    assert (counts.attention_forward, counts.attention_backward) == (1, 1)
    counts = compiled.count(SPLASH.replace("PART", str(SIZES.tokens)), SIZES)
    assert (counts.attention_forward, counts.attention_backward) == (2, 2)


SCATTER = """HloModule jit_f

%all-reduce-scatter.2.clone (input: bf16[2,64,32]) -> bf16[2,32,32] {
  %input = bf16[2,64,32]{2,1,0} parameter(0)
  %all-reduce.7 = bf16[2,64,32]{2,1,0} all-reduce(%input), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %kept = bf16[2,32,32]{2,1,0} dynamic-slice(%all-reduce.7, %zero, %zero, %zero), dynamic_slice_sizes={2,32,32}
}

ENTRY %main (p: bf16[2,64,32]) -> bf16[2,32,32] {
  %p = bf16[2,64,32]{2,1,0} parameter(0)
  ROOT %fusion.1 = bf16[2,32,32]{2,1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2.clone
}
"""


def test_a_tpus_reduce_scatter_counts_as_one():
    (item,) = compiled.count(SCATTER, SIZES).collectives
    # Two devices: each sends half of 2 x 64 x 32 values of 2 bytes. An all-reduce would send twice as much.
    assert (item.kind, item.axes, item.wire_bytes) == ("reduce-scatter", ("tensor",), 4096)


def test_what_lies_in_the_vocabulary_loop_is_told():
    counts = counted()
    assert {item.kind for item in counts.vocabulary_collectives} == {"all-gather", "all-reduce"}
    scalars = LOOP.replace("all-reduce(%logits)", "all-reduce(%few)").replace(
        "%logits = f32[16,500]", "%few = f32[16]{0} constant(0)\n  %logits = f32[16,500]"
    )
    few = compiled.count(scalars.replace("GROUPS", GROUPS).replace("TRIPS", TRIPS), SIZES)
    assert [item.kind for item in few.vocabulary_collectives] == ["all-gather"]
    assert len(counts.vocabulary_arrays) == 1
    assert counts.vocabulary_arrays[0].startswith("f32[64, 500]")


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups=[4,2]<=[2,2,2]T(0,2,1), use_global_device_ids=true",
        "replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}, use_global_device_ids=true",
        "replica_groups=mesh['a'=4,'b'=2], device_ids=([4,2]<=[2,2,2]T(0,2,1)) {'b'}, use_global_device_ids=true",
        "source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}",
    ],
)
def test_all_spellings_of_groups_name_the_same_axis(groups):
    assert counted(groups).collectives[-1].axes in {("fsdp",), ("tensor",)}
    gather = next(item for item in counted(groups).collectives if item.kind == "all-gather")
    assert (gather.axes, gather.devices) == (("fsdp",), 2)


def test_an_unknown_spelling_of_groups_is_refused():
    with pytest.raises(protocols.DataError, match="unknown form of replica groups"):
        counted("replica_groups=[rings of four]")
    with pytest.raises(protocols.DataError, match="no HLO module"):
        hlo.Module("nothing")


def test_a_loop_without_trip_count_ends_at_its_constant():
    """TPU's text gives none."""
    assert counted(trips="") == counted()
    endless = LOOP.replace("constant(4)", "parameter(1)").replace("GROUPS", GROUPS).replace("TRIPS", "")
    counts = compiled.count(endless, SIZES)
    assert counts.data_dependent_loops == 1
    assert counts.matmul_flops == 0


def case(**changes: object) -> programs.CompiledCase:
    program = programs.Program.counted(counted(), argument_bytes=30e9, temporary_bytes=5e9, compile_seconds=1.0)
    made = programs.CompiledCase(
        model="Qwen3-1.7B",
        parameters=1,
        target="h100",
        data=1,
        fsdp=8,
        tensor=1,
        rows=8,
        row_tokens=8192,
        packed=True,
        remat="dots",
        state_bytes=20e9,
        parameter_bytes=10e9,
        programs={"policy": program, "apply": dataclasses.replace(program, temporary_bytes=1e9)},
    )
    return dataclasses.replace(made, **changes)


def test_a_file_keeps_what_was_counted(tmp_path):
    programs.write(tmp_path / "compiled.json", [case()])
    assert programs.read(tmp_path / "compiled.json") == (case(),)
    (tmp_path / "other.json").write_text('{"cases": [{"model": "x", "programs": {}}]}')
    with pytest.raises(protocols.ConfigError, match=r"config.planner.compiled: .* not written by launch/compile.py"):
        programs.read(tmp_path / "other.json")
    with pytest.raises(protocols.ConfigError, match="cannot be read"):
        programs.read(tmp_path / "missing.json")


def test_memory_counts_state_and_the_largest_program_once():
    # The gradient: state 20, beside its 10 of parameters 20 more of arguments, and 5 of temporaries. The update: its 20
    # of state are among its arguments.
    assert case().memory_bytes == 45e9


def test_a_reference_model_is_counted_once_whether_compiled_or_not(tmp_path):
    run = config_lib.RunConfig()
    run.trainer.fsdp, run.trainer.row_tokens, run.model.remat = 8, 8192, "dots"
    shape = model_config.load_preset("Qwen3-1.7B")
    parameters = costs.CostModel(hardware.SHEETS[0], shape).parameters
    plain = memory.trainer_bytes(run, shape)
    run.algorithm.kl_coefficient, run.model.compute_dtype = 0.1, "bfloat16"
    by_formula = memory.trainer_bytes(run, shape)
    assert by_formula - plain == pytest.approx(2 * parameters / 8)
    # A teacher behind a URL takes no memory here.
    run.algorithm.teacher = "http://127.0.0.1:8000/v1"
    assert memory.trainer_bytes(run, shape) == plain
    run.algorithm.teacher = ""
    run.planner.compiled = str(tmp_path / "compiled.json")
    for reference, wanted in ((True, case().memory_bytes), (False, by_formula)):
        programs.write(tmp_path / "compiled.json", [case(parameters=parameters, reference=reference)])
        assert memory.trainer_bytes(run, shape) == wanted


def test_expected_mfu_lies_between_all_and_no_communication_hidden():
    shape = model_config.load_preset("Qwen3-1.7B")
    foreseen = programs.expected(case(), shape)
    # A tied table multiplies, so every parameter does.
    assert foreseen.model_flops == costs.train_flops(shape, model_config.parameter_count(shape), [8192])
    slow, fast = foreseen.mfu
    assert 0 < slow < fast
    ideal = foreseen.model_flops / foreseen.peak_flops
    assert slow == pytest.approx(ideal / (foreseen.arithmetic_seconds + foreseen.communication_seconds))


def test_least_bytes_are_six_a_parameter_over_many_shards():
    """A layer's parameter: 2 gathers of 2 bytes and a gradient of 2. The projection's: a gather and a float32 sum."""
    shape = model_config.load_preset("Qwen3-1.7B")
    parameters, tables = model_config.parameter_count(shape), shape.vocab_size * shape.hidden_size
    rows = 2 * 2 * 8192 * shape.hidden_size  # the lookup's, and their gradients
    wide = communication_bounds.volumes(shape, 1, 1 << 20, 1, 8192)
    assert wide.fsdp == pytest.approx(6 * parameters + rows, rel=1e-4)
    assert (wide.data, wide.tensor) == (0, 0)
    # An all-reduce sends half of the gradients twice, over two replicas.
    reduced = 2 * parameters + 2 * tables
    assert communication_bounds.volumes(shape, 2, 1, 1, 8192).data == pytest.approx(reduced, rel=1e-4)
    split = communication_bounds.volumes(shape, 1, 4, 2, 8192)
    assert split.fsdp == pytest.approx(wide.fsdp / 2 * 3 / 4, rel=1e-4)
    assert split.tensor == pytest.approx((10 * 28 + 5) * 8192 * 2048 * 2 / 2)


def test_over_context_the_state_travels_as_over_fsdp_and_attention_exchanges_its_vectors():
    shape = model_config.load_preset("Qwen3-1.7B")  # 28 layers, 16 query heads and 8 key heads of 128
    over_fsdp, over_context = (
        communication_bounds.volumes(shape, 1, 8, 1, 8192),
        communication_bounds.volumes(shape, 1, 1, 1, 8192, context=8),
    )
    assert over_context.fsdp == over_fsdp.fsdp
    assert over_context.context == pytest.approx(2 * 28 * 8192 * (2 * 16 + 2 * 8) * 128 * 2 * 7 / 8)
    # Of 4 key heads a tensor shard, 8 devices are each sent one copy.
    assert communication_bounds.over_context(shape, 1, 2, 8, 1) == pytest.approx(28 * (2 * 8 + 2 * 8) * 128 * 2 * 7 / 8)
    # 16 devices do not divide 8 query heads: keys and values go to 15 others, and queries change places.
    assert communication_bounds.over_context(shape, 1, 2, 16, 1) == pytest.approx(28 * (2 * 4 * 15 + 2 * 8) * 128 * 2)


def test_experts_stay_and_their_tokens_travel_as_often_as_they_are_taken():
    dense = model_config.load_preset("Qwen3-1.7B")
    sparse = model_config.load_preset("Qwen3-30B-A3B")
    alone = communication_bounds.volumes(sparse, 1, 1, 1, 8192)
    assert alone.total == 0
    # Every layer's experts are 604 M parameters, of which nothing is gathered; 8 of 128 on 8 devices are 5.25 - 0.66
    # others a token, five times.
    one = dataclasses.replace(sparse, num_layers=1)
    more = dataclasses.replace(sparse, num_layers=2)
    layer = (
        communication_bounds.volumes(more, 1, 8, 1, 8192).fsdp - communication_bounds.volumes(one, 1, 8, 1, 8192).fsdp
    )
    tokens = 5 * 7 * (1 - (7 / 8) ** 8) * 8192 * 2048 * 2
    attention = 2048 * (2 * 32 * 128 + 2 * 4 * 128) + 2 * 2048 + 2 * 128 + 128 * 2048  # norms and router, too
    assert layer == pytest.approx(tokens + attention * 3 * 2 * 7 / 8, rel=1e-6)
    assert communication_bounds.volumes(dense, 1, 8, 1, 8192) == communication_bounds.volumes(
        dataclasses.replace(dense, expert_intermediate_size=768, experts_per_token=8), 1, 8, 1, 8192
    )
