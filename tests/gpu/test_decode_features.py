"""Pages, several queries, masks and the rest of what a call may ask for, on a GPU against fp64.

`SHAPES` and `FEATURES` are multiplied with some formats; hypothesis draws lengths and numbers for kernels that are
compiled already, so that no example waits for the compiler.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.runtime import arch_of, load_many
from tests.attention.cases import Call, assert_close, make_call
from tests.gpu.specs import decode_spec

pytestmark = pytest.mark.gpu

CUDA = "cuda"
LENGTHS = (0, 1, 15, 16, 17, 300, 513, 4000)
ALIKE = (500, 512, 513, 480)

STORAGE: dict[str, dict[str, Any]] = {
    "pages of 64": {"page_size": 64},
    "pages of 16": {"page_size": 16, "num_kv_heads": 2, "group": 4},
    "pages of 48, 8 heads": {"page_size": 48, "num_kv_heads": 8, "group": 2},
    "pages of 256, head-major": {"page_size": 256, "num_kv_heads": 2, "cache_layout": "HND"},
    "head-major": {"num_kv_heads": 3, "group": 1, "cache_layout": "HND", "max_seq_len": 4000},
}
QUERIES: dict[str, dict[str, Any]] = {
    "4 queries": {"q_len": 4},
    "16 queries of 3 heads": {"q_len": 16, "group": 3},
    "4 queries that see everything": {"q_len": 4, "causal": False},
    "window": {"window_size": 100},
    "window of 1": {"window_size": 1},
    "2 queries, window of 700": {"q_len": 2, "window_size": 700},
}
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "bias": {"attn_bias": "fp32", "max_seq_len": 4000},
    "all": {
        "q_len": 3,
        "group": 4,
        "num_kv_heads": 2,
        "page_size": 64,
        "window_size": 333,
        "softcap": 30.0,
        "sinks": True,
        "alibi": True,
        "attn_bias": "bf16",
        "bias_dims": "ihj",
    },
}
# 17 to 32 rows of one KV head and INT4 with one group: four blocks of queries a warp.
TOGETHER: dict[str, dict[str, Any]] = {
    "3 queries": {"q_len": 3},
    "9 queries of 2 heads": {"q_len": 9, "group": 2},
    "4 queries, pages of 64": {"q_len": 4, "page_size": 64},
    "4 queries, pages of 16": {"q_len": 4, "page_size": 16},
    "4 queries, head-major": {"q_len": 4, "num_kv_heads": 3, "cache_layout": "HND", "max_seq_len": 4000},
    "4 queries, window of 333": {"q_len": 4, "window_size": 333},
    "4 queries, pages of 256, window, soft cap, sinks": {
        "q_len": 4,
        "page_size": 256,
        "window_size": 700,
        "softcap": 5.0,
        "sinks": True,
    },
}
PAGES_BY_HEAD: dict[str, Any] = {"page_size": 64, "num_kv_heads": 8, "group": 4, "cache_layout": "HND"}
BY_HEAD: dict[str, dict[str, Any]] = {
    "8 heads, head-major": PAGES_BY_HEAD,
    "8 heads, head-major, window of 333": {**PAGES_BY_HEAD, "page_size": 16, "window_size": 333},
    "8 heads, head-major, 4 queries": {**PAGES_BY_HEAD, "q_len": 4},
    "8 heads, head-major, 3 queries, window of 333": {**PAGES_BY_HEAD, "q_len": 3, "window_size": 333, "sinks": True},
}
"""Engines have pages of rows with headers like these. Where lengths differ, CTAs take ranges of all requests' tiles."""
K8V4 = ("int8_token_head", "int4_g4")
CASES = {
    f"{kv_format}, {name}": {"kv_format": kv_format, **options}
    for kv_formats, cases in (
        (("bf16", "int4_g1", "int4_g4", "int8_token_head", "e4m3_tensor"), STORAGE | QUERIES),
        (("bf16", "int4_g4"), SCORES),
        (("int4_g1",), TOGETHER),
        (("int4_g4", "int8_token_head", K8V4), BY_HEAD),
        ((("int8_channel", "int4_g1"), ("bf16", "e4m3_token_head")), {"pages of 64": STORAGE["pages of 64"], "": {}}),
    )
    for kv_format in kv_formats
    for name, options in cases.items()
}


def call_of(case: str, lengths: tuple[int, ...], device: str = CUDA, seed: int = 0) -> Call:
    return make_call(lengths=lengths, device=device, seed=seed, **CASES[case])


def spec_of(case: str, lengths: tuple[int, ...] = LENGTHS) -> AttentionSpec:
    """The kernel that serves a case; needs no GPU."""
    return decode_spec(make_call(lengths=lengths, blank=True, **CASES[case]))


def slack_of(case: str) -> float:
    """Of the LSE: K's scales per column go into q, and the product is rounded to fp16 as the MMA takes it."""
    return 1e-3 if "int8_channel" in case else 0.0


def specs() -> list[AttentionSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    return list(dict.fromkeys(spec_of(case, lengths) for case in CASES for lengths in (LENGTHS, ALIKE)))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    load_many(specs(), arch_of())


@pytest.mark.parametrize("lengths", [LENGTHS, ALIKE], ids=["ragged", "alike"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_reference(case, lengths):
    call = call_of(case, lengths)
    out, lse = call.run(return_lse=True)
    again = call.run()
    assert torch.equal(out, again), "the same inputs give the same bits"
    assert_close(call, out, lse, lse_slack=slack_of(case))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(sorted(CASES)),
    lengths=st.lists(st.integers(0, 4000), min_size=len(LENGTHS), max_size=len(LENGTHS)),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(case, lengths, seed):
    """Of a cache of 4000 tokens, so that the kernels are those of `compiled`."""
    call = call_of(case, (*lengths[:-1], 4000), seed=seed)
    out, lse = call.run(return_lse=True)
    assert_close(call, out, lse, lse_slack=slack_of(case))


@pytest.mark.parametrize(
    ("kv_format", "options"),
    [("int4_g1", {"page_size": 64}), (K8V4, {**PAGES_BY_HEAD, "num_kv_heads": 4})],
    ids=["one head", "K8V4, head-major"],
)
def test_one_long_request_among_many_short_ones(kv_format, options):
    lengths = [100 + 14 * index for index in range(64)]  # their cache takes 26 GB while it is quantised
    lengths[23] = 50_000
    call = make_call(kv_format, lengths, max_seq_len=50_000, device=CUDA, **options)
    out, lse = call.run(return_lse=True)
    for request in (0, 22, 23, 24, 63):
        part = slice(request, request + 1)
        assert_close(call.row(request), out[part], lse[part])


@pytest.mark.parametrize("name", TOGETHER)
def test_scores_that_fp32_has_in_steps_of_64_come_to_an_end(name):
    """Also where a logit exceeds a raised reference by what it is rounded by."""
    call = call_of(f"int4_g1, {name}", LENGTHS)
    call.q.mul_(2.0**30)
    call.run()
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", [case for case in CASES if "bf16" not in CASES[case]["kv_format"]])
def test_a_query_with_an_infinite_number_is_nan_and_leaves_the_others_alone(case):
    """Queries of a KV head meet codes with a power of 2 in common."""
    call = call_of(case, LENGTHS)
    want = call.run()
    call.q[5, 0, -1, 17], call.q[7, -1, 0, 100], call.q[7, 0, -1, 0] = torch.inf, -torch.inf, torch.nan
    found, spoilt = call.run(), ~call.q.isfinite().all(-1)
    assert found[spoilt].isnan().all() and torch.equal(found[~spoilt], want[~spoilt])


def test_a_fixed_split_does_not_depend_on_the_batch():
    call = call_of("int4_g1, pages of 64", LENGTHS)
    together = call.run(num_splits=3)
    for request in range(len(LENGTHS)):
        assert torch.equal(call.row(request).run(num_splits=3)[0], together[request])


def test_a_block_table_may_be_a_part_of_a_wider_one():
    call = call_of("int4_g4, pages of 64", LENGTHS)
    want, table = call.run(), call.options["block_table"]
    wide = torch.cat([table, torch.full_like(table, 2**31 - 1)], dim=1)
    part = wide[:, : table.shape[1]]
    assert torch.equal(call.run(block_table=part), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run(block_table=part)
    part.copy_(table.flip(0))
    call.seq_lens.copy_(call.seq_lens.flip(0))
    graph.replay()
    assert torch.equal(captured, call.run(block_table=part.contiguous()))


def test_a_misaligned_scale_is_refused_on_a_repeated_call_too():
    call = call_of("('int8_channel', 'int4_g1'), pages of 64", LENGTHS)
    call.run()
    scale = call.options["k_scale"]
    moved = torch.empty(scale.numel() + 1, device=CUDA)[1:].view_as(scale).copy_(scale)
    with pytest.raises(ValueError, match="k_scale: got a tensor that starts 4 bytes past a multiple of 16"):
        call.run(k_scale=moved)
    torch.cuda.synchronize()
    assert_close(call, call.run())


def test_one_graph_serves_changing_lengths_and_tables():
    call = call_of("int4_g4, pages of 64", LENGTHS)
    out = call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run()
    graph.replay()
    assert torch.equal(captured, out)
    call.options["block_table"].copy_(call.options["block_table"].flip(0))
    call.seq_lens.copy_(call.seq_lens.flip(0))
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert_close(call, captured)
