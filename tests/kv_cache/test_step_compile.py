"""The kernels of a step: compiled without spills, they start and wait where they must, and are else as the others."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.formats.scores.features import Features
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.config import AppendConfig, RowPrologue, RowTransform
from cute_kernels.kv_cache.step_compile import StepSpec, compile_step
from cute_kernels.kv_cache.step_config import StepConfig, serving_config, step_config
from cute_kernels.runtime import KernelSpec, default_cache, native
from cute_kernels.runtime.composed import changed
from tests import golden

needs_compiler = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

FORMATS = ("bf16", "int4_g1", "int4_g4", "int8_token_head", "int8_channel", "e4m3_tensor", "e5m2")


def problem(kv_format: str, batch: int = 32, num_kv_heads: int = 1, head_dim: int = 128, **others) -> AttentionProblem:
    return AttentionProblem.uniform(batch, 8192, 8 * num_kv_heads, num_kv_heads, head_dim, kv_format, "bf16", **others)


PAGED = {"page_tokens": 64, "features": Features(paged=True)}
PROBLEMS = [problem(name, **options) for name in FORMATS for options in ({}, PAGED)]
PROBLEMS += [
    problem("bf16", num_kv_heads=8, head_dim=256),
    problem("int4_g4", num_kv_heads=8),
    problem("int4_g1", aligned=False),
    problem("int4_g1", q_len=4, features=Features(queries=True, causal=True)),
    problem("e4m3_tensor", features=Features(window=True, sinks=True)),
]


def after_append(of: AttentionProblem) -> DecodeConfig:
    return make_schedule(dataclasses.replace(of, after_append=True)).config


def leading(kv_format: str, prologue: RowPrologue, transform: RowTransform | None = None) -> AppendConfig:
    return replace(AppendConfig.alike(kv_format, "bf16", 128, prologue), leads=True, transform=transform)


APPENDS = [leading(name, RowPrologue("half", 128)) for name in FORMATS]
DECODES = dict.fromkeys(after_append(of) for of in PROBLEMS)
BIASES, NORMS = {"has_bias": True}, {"has_norm": True}
HEADS_FIRST = Features(paged=True, head_major=True)
ALL = RowTransform(center=True, factor=True, v_factor=True, k_rotation=128, v_rotation=128)
RESTORED = replace(HEADS_FIRST, v_rotation=128, v_factor=True)


def alone(kv_format: str, batch: int = 1, num_kv_heads: int = 8, rope: str = "half", **others) -> StepConfig:
    """The kernel of a step in one launch."""
    features, transform = others.pop("features", HEADS_FIRST), others.pop("transform", None)
    terms, positions = others.pop("terms", {}), others.pop("positions", False)
    of = problem(kv_format, batch, num_kv_heads, page_tokens=64, features=features, **others)
    prologue = RowPrologue(rope, 128 if rope != "none" else 0, **terms)
    append = leading(kv_format, prologue, transform)
    config = step_config(after_append(of), append, positions)
    assert config is not None
    return config


ALONE = [alone(name) for name in FORMATS] + [
    alone("int4_g4", 32),
    alone("int4_g4", 64, 1),
    alone("int4_g4", 32, rope="interleaved"),
    alone("bf16", 32, rope="none"),
    alone("int8_token_head", features=replace(HEADS_FIRST, window=True, sinks=True)),
    alone("int4_g4", 512, transform=RowTransform(center=True, k_rotation=32)),
    alone("int8_token_head", transform=RowTransform(center=True)),
    alone("int4_g4", transform=ALL, features=RESTORED),
    alone("int4_g1", 64, 1, transform=ALL, features=RESTORED),
    *(alone(name, batch, features=Features(paged=True)) for name in ("bf16", "int4_g4") for batch in (1, 64)),
    alone("int4_g4", 512, transform=RowTransform(center=True, k_rotation=32), features=Features(paged=True)),
    alone("bf16", positions=True),
    alone("int4_g4", positions=True, terms=NORMS),
    alone("bf16", 32, terms=NORMS | BIASES, features=Features(paged=True)),
    alone("int4_g4", 64, terms=BIASES, transform=ALL, features=RESTORED),
]
SPECS: list[KernelSpec] = [
    *(AttentionSpec(config) for config in golden.worth_compiling(DECODES, AttentionSpec)),
    *(AppendSpec(config) for config in golden.worth_compiling(APPENDS, AppendSpec)),
    *(StepSpec(config) for config in golden.worth_compiling(ALONE, StepSpec)),
]


@pytest.mark.parametrize("of", PROBLEMS, ids=lambda of: make_schedule(of).config.name)
def test_a_step_is_scheduled_as_attention_alone_but_takes_no_tile_early(of: AttentionProblem):
    """So both give the same numbers."""
    alone, step = make_schedule(of), make_schedule(dataclasses.replace(of, after_append=True))
    assert step.config.pipeline.early_tiles == 0 and step.config.after_append
    same = changed(step.config, early_tiles=alone.config.pipeline.early_tiles, after_append=False)
    assert dataclasses.replace(step, config=same) == alone
    assert step.config.can_implement() is None and step.config.name != alone.config.name


@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "want"), [(1, 8, (1, 16)), (8, 8, (1, 2)), (32, 8, (2, 1)), (64, 1, (1, 2))]
)
def test_a_step_in_one_launch_has_as_few_ctas_on_an_sm_as_are_as_fast(batch, num_kv_heads, want):
    """(CTAs of an SM, splits) of requests of 8192 tokens, as measured: each CTA rotates its queries."""
    of = problem("int4_g4", batch, num_kv_heads, page_tokens=64, features=HEADS_FIRST, after_append=True)
    schedule = make_schedule(replace(of, num_q_heads=32 if num_kv_heads == 8 else 8, appends=True))
    assert (schedule.config.pipeline.ctas_per_sm, schedule.num_splits) == want


def test_a_tile_that_may_be_unwritten_is_not_taken_early():
    config = changed(after_append(PROBLEMS[0]), early_tiles=1)
    assert config.can_implement() == "early_tiles 1 of a cache that is still being written is not 0"


@pytest.fixture(scope="module")
def measured() -> dict[str, golden.Entry]:
    return golden.measure(SPECS, default_cache())


@needs_compiler
def test_no_kernel_of_a_step_spills(measured: dict[str, golden.Entry]):
    for name, (kernel,) in measured.items():
        assert kernel["stack_bytes"] + kernel["spill_store_bytes"] + kernel["spill_load_bytes"] == 0, name


@needs_compiler
def test_the_append_lets_attention_start_and_attention_waits(measured: dict[str, golden.Entry]):
    """PREEXIT is griddepcontrol.launch_dependents, of the append at once or once lengths are there, of attention when
    all tiles are asked for; ACQBULK is griddepcontrol.wait, before the queries and before every place where tiles are
    copied."""
    for name, (kernel,) in measured.items():
        starts, waits = (kernel["opcodes"].get(opcode, 0) for opcode in ("PREEXIT", "ACQBULK"))
        assert (starts, min(waits, 2)) == ((2, 0) if name.startswith("append") else (1, 2)), name


@needs_compiler
def test_queries_are_loaded_as_what_another_kernel_writes(tmp_path):
    """Not through the path for constants, which may be older than the wait, and behind that."""
    from cute_kernels.attention.compile import compile_decode

    compiled = compile_decode(after_append(problem("int4_g1")), "sm_90a", f"--keep-ptx --dump-dir={tmp_path}")
    text = compiled.artifacts.PTX
    lines = [line.strip() for line in (text.decode() if isinstance(text, bytes) else text).splitlines()]
    wait = lines.index("griddepcontrol.wait;")
    queries = [i for i, line in enumerate(lines) if line.startswith("ld.global.v4")]
    assert len(queries) == 4 and all(wait < i < wait + 100 for i in queries)


@needs_compiler
def test_a_step_in_one_launch_reads_nothing_before_the_launch_before_it_has_ended(tmp_path):
    """Lengths, pages, rows and caches may all be what that one, or one before it, has written."""
    compiled = compile_step(alone("int4_g4"), "sm_90a", f"--keep-ptx --dump-dir={tmp_path}")
    text = compiled.artifacts.PTX
    lines = [line.strip() for line in (text.decode() if isinstance(text, bytes) else text).splitlines()]
    wait = lines.index("griddepcontrol.wait;")
    read = [i for i, line in enumerate(lines) if line.startswith(("ld.global", "cp.async", "prefetch"))]
    assert len(read) > 10 and wait < min(read)


@pytest.mark.parametrize("changes", [{}, {"terms": NORMS}, {"transform": RowTransform(k_rotation=32)}])
def test_queries_that_meet_more_than_rope_are_an_appends_where_many_waves_of_ctas_follow_each_other(changes):
    """As measured with 8 KV heads: 15 waves of 512 requests, heads first; 4 of 128, and of 512, tokens first."""
    prologue = RowPrologue("half", 128, **changes.get("terms", {}))
    append = leading("int4_g4", prologue, changes.get("transform"))

    def served(batch: int, features: Features) -> bool:
        of = problem("int4_g4", batch, 8, page_tokens=64, features=features, after_append=True)
        of = replace(of, num_q_heads=32, appends=True)
        return serving_config(of, make_schedule(of), append) is not None

    assert served(128, HEADS_FIRST) and served(512, Features(paged=True))
    assert served(512, HEADS_FIRST) == (not changes)


UNSERVED = {
    "two tokens a request": (problem("int4_g4", 1, 8, q_len=2, features=Features(queries=True, head_major=True)), {}),
    "words": (problem("int4_g1", 1, aligned=False, features=HEADS_FIRST, page_tokens=64), {}),
    "no features": (problem("int4_g4"), {}),
    "a shift": (problem("int4_g4", features=HEADS_FIRST), {"transform": RowTransform(center=True, shift=True)}),
    "another head_dim": (problem("bf16", head_dim=64, features=HEADS_FIRST), {}),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_a_step_in_one_launch_does_not_do_is_left_to_two(name):
    of, changes = UNSERVED[name]
    append = leading(of.k_format, RowPrologue("half", 128))
    assert step_config(after_append(of), replace(append, **changes)) is None
