"""Raw rows of some of a token's heads, brought by tensor maps: against fp64, and the bits of bulk copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.configured import bind_config
from cute_kernels.attention.call import make_call
from cute_kernels.attention.candidates import BULK_BYTES, candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.plan import problem_of
from cute_kernels.runtime import arch_of, load_many
from cute_kernels.runtime.composed import changed
from tests.attention import cases
from tests.attention.cases import Call, assert_close
from tests.tensors import among_others

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 33, 64, 513, 1200, 63, 2049)
FEW_LENGTHS = (1205, 63)  # of requests whose single queries are served so
TOKENS = 2  # dimension before which a gap is between tokens
CASES: list[tuple[Any, int, int, int, int | None]] = [  # format, KV heads, group, queries, page size
    ("int4_g1", 8, 4, 4, 64),
    ("int4_g1", 8, 4, 4, 16),
    ("int4_g1", 8, 4, 3, None),
    (("int4_g1", "int4_g4"), 8, 4, 4, 32),
    ("int4_g4", 8, 4, 4, 64),
    ("int4_g4", 8, 4, 4, 16),
    ("int4_g4", 8, 4, 8, None),
    (("int4_g4", "int4_g2"), 8, 4, 3, 32),
    ("int4_g1", 8, 4, 8, 64),
    ("int4_g2", 8, 4, 4, None),
    ("int4_g1", 8, 4, 1, 64),
    ("int4_g4", 8, 8, 1, 16),
    ("int8_token_head", 8, 4, 1, 64),
    ("e4m3_token_head", 4, 4, 1, 16),
    (("int8_token_head", "int4_g4"), 8, 4, 1, 32),
    (("bf16", "int4_g1"), 8, 4, 1, 64),
]


def call_for(case, **options: Any) -> Call:
    kv_format, num_kv_heads, group, q_len, page_size = case
    lengths = LENGTHS if q_len > 1 else FEW_LENGTHS
    return cases.make_call(
        kv_format, lengths, num_kv_heads=num_kv_heads, group=group, q_len=q_len, page_size=page_size, **options
    )


def mapped(call: Call) -> list[DecodeConfig]:
    """Candidates of the schedule that take some of a token's heads by maps."""
    options: Any = call.options
    checked = make_call(*call.tensors, kv_format=call.kv_format, **options)
    return [config for config in candidate_configs(problem_of(checked)) if "map" in config.copies]


def in_bulk(config: DecodeConfig) -> DecodeConfig | None:
    """The same, but a bulk copy a token; None where these heads' rows are no whole vectors."""
    sizes = [config.mainloop.num_heads * load.form.row_bytes(load.head_dim) for load in (config.k, config.v)]
    if any(size % BULK_BYTES for size in sizes if size):
        return None
    k, v = ("bulk" if copy == "map" else copy for copy in config.copies)
    return changed(config, k_copy=k, v_copy=v)


def specs() -> list[AttentionSpec]:
    """The kernels that the tests of this module need."""
    configs = [config for case in CASES for config in mapped(call_for(case, blank=True))]
    return [AttentionSpec(each) for config in dict.fromkeys(configs) for each in (config, in_bulk(config)) if each]


@pytest.fixture(scope="module")
def kernels() -> None:
    load_many(specs(), arch_of())


def run(config: DecodeConfig, call: Call, num_splits: int) -> torch.Tensor:
    out = torch.full_like(call.q, torch.nan)
    options: Any = call.options | {"kv_format": call.kv_format}
    bind_config(config, *call.tensors, out=out, num_splits=num_splits, **options)()
    return out


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_give_the_bits_of_bulk_copies(case):
    """Whatever lies behind a request's end, between pages, or between tokens."""
    dense = call_for(case, device="cuda")
    k_cache, v_cache = (among_others(cache, TOKENS)[0] for cache in (dense.k_cache, dense.v_cache))
    apart = Call(dense.q, k_cache, v_cache, dense.seq_lens, dense.kv_format, dense.options)
    configs = mapped(dense)
    assert configs
    for config in configs:
        for num_splits in (1, 3):
            other = in_bulk(config)
            want = run(config if other is None else other, dense, num_splits)
            assert_close(dense, want, None)
            for call in (dense, apart):
                assert torch.equal(run(config, call, num_splits), want)
