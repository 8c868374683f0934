"""Configurations say what they need and refuse what cannot be compiled; the host's arithmetic is the kernels'."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.formats.kv import FORMATS, HEAD_DIMS
from cute_kernels.kv_cache.compile import AppendSpec, shipped_specs
from cute_kernels.kv_cache.config import (
    AppendConfig,
    BulkConfig,
    RowPrologue,
    divisor_of,
    rows_per_team,
    team_lanes,
)
from cute_kernels.kv_cache.plan import config_of
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.runtime.composed import changed
from tests.each import each
from tests.kv_cache.cases import Shape, make_call
from tests.kv_cache.transformed import make_transform, with_transform

DECODE = AppendConfig.alike("e4m3_head", "bf16", 128, RowPrologue("half", 128)).for_decode()
APPEND = AppendConfig.alike("int4_g4", "bf16", 128, RowPrologue("half", 128))
BULK = BulkConfig("quantize", "int8_g4", "fp32", 128)
SHIPPED = [spec.config for spec in shipped_specs() if isinstance(spec, AppendSpec)]


@each("config", [APPEND, BULK, *SHIPPED], ids=lambda config: config.name)
def test_what_ships_can_be_implemented(config):
    assert config.can_implement() is None


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (APPEND, {"k_head_dim": 72}, "head_dim_k 72 is not one of 64, 80, 96, 128, 192, 256"),
        (APPEND, {"v_head_dim": 1024}, "head_dim_v 1024 is not one of"),
        (APPEND, {"dtype": "fp32"}, "dtype 'fp32' is not one of bf16, fp16"),
        (APPEND, {"rope": "quarter"}, "rope 'quarter' is not one of none, half, interleaved"),
        (APPEND, {"rope": "none"}, "rotary_dim 128 without RoPE"),
        (APPEND, {"rotary_dim": 130}, "rotary_dim 130 is not an even number from 2 to head_dim_k = 128"),
        (APPEND, {"rotary_dim": 63}, "rotary_dim 63 is not an even number"),
        (BULK, {"direction": "back"}, "direction 'back' is not 'quantize' or 'dequantize'"),
        (BULK, {"head_dim": 100}, "head_dim 100 is not one of"),
        (BULK, {"dtype": "fp64"}, "dtype 'fp64' is not one of bf16, fp16, fp32"),
    ],
)
def test_what_cannot_be_implemented_says_why(config, changes, reason):
    found = changed(config, **changes).can_implement()
    assert found is not None and re.search(reason, found), found


def test_names_tell_configurations_apart():
    changes = {"v_format": "int8_g4", "v_head_dim": 64, "rope": "interleaved"}
    changes |= {
        "has_bias": True,
        "has_norm": True,
        "lane_columns": 8,
        "leads": True,
        "decode": True,
    }
    configs = [*SHIPPED, *(changed(APPEND, **{name: value}) for name, value in changes.items())]
    assert len({config.name for config in configs}) == len(set(configs))
    assert all(re.fullmatch(r"\w+", config.name) for config in configs)


def test_what_ships_is_few_and_has_every_format_at_the_usual_head_dim():
    assert len(SHIPPED) <= 80
    dtypes = {"bf16", "fp16"}
    for decode in (False, True):
        of_kind = [config for config in SHIPPED if config.decode == decode]
        usual = {(config.k.format, config.dtype) for config in of_kind if config.k.head_dim == 128}
        assert usual == {(name, dtype) for name in FORMATS for dtype in (dtypes & {name} or dtypes)}
    assert all(json.loads(spec.config_json())["prologue"]["rope"] == "half" for spec in shipped_specs())


@pytest.mark.parametrize("place", ["table", "contiguous", "slots"])
@pytest.mark.parametrize("new", [(1, 1, 1), (1, 2)], ids=["decode", "prefill"])
@pytest.mark.parametrize("positions", ["none", "int32"])
def test_one_token_a_request_at_its_end_has_a_kernel_of_its_own(place, new, positions):
    call = make_call(Shape("e4m3_head", new=new, place=place, rope=Rope(128), positions=positions))
    own = place != "slots" and new == (1, 1, 1) and positions == "none"
    general = dataclasses.replace(DECODE, decode=False, lane_columns=16)
    assert config_of(call) == (DECODE if own else general)
    assert config_of(call, leads=True) == dataclasses.replace(general, leads=True)


@pytest.mark.parametrize("new", [(1,), (1, 1), (2,)], ids=["one token", "two requests", "two tokens"])
def test_a_single_token_of_a_transformed_cache_leads_by_the_kernel_for_decode(new):
    call = make_call(Shape("int4_g4", new=new, lengths=(40,) * len(new), rope=Rope(128)))
    transformed = with_transform(call, make_transform(call.k.shape[1], 128, k_rotation=32))
    own, leading = config_of(transformed), config_of(transformed, leads=True)
    assert leading.leads and leading.decode == (new == (1,))
    assert leading == dataclasses.replace(own, leads=True) or new == (1, 1)
    assert not config_of(call, leads=True).decode


@each("v_head_dim", HEAD_DIMS)
@each("head_dim", HEAD_DIMS)
def test_lanes_own_even_runs_and_groups_are_whole_lanes(head_dim, v_head_dim):
    lanes = team_lanes(head_dim, v_head_dim)
    assert lanes >= 8 and 32 % lanes == 0
    assert head_dim % (2 * lanes) == v_head_dim % (2 * lanes) == 0
    if head_dim == v_head_dim:
        assert head_dim // lanes in (8, 10, 12, 16)


@given(divisor=st.integers(1, 2**31 - 1), data=st.data())
def test_dividing_by_multiplication(divisor, data):
    value = data.draw(st.integers(0, (2**63 - 1) // divisor))
    magic = divisor_of(divisor)
    assert -(2**63) <= magic < 2**63
    assert (2 * value * (magic % 2**64)) >> 64 == value // divisor


@given(
    blocks=st.integers(1, 10_000),
    num_q_heads=st.integers(0, 100),
    num_kv_heads=st.integers(1, 40),
    wave=st.integers(1, 2000),
    ratio=st.sampled_from((1, 2, 4)),
)
def test_teams_take_as_few_rows_as_one_wave_allows(blocks, num_q_heads, num_kv_heads, wave, ratio):
    """KV heads a ``ratio``-th of the q heads, at least one."""

    def ctas(q_rows: int, kv_rows: int) -> int:
        return blocks * (-(-num_q_heads // q_rows) + 2 * -(-num_kv_heads // kv_rows))

    rows = rows_per_team(blocks, num_q_heads, num_kv_heads, wave, ratio)
    shares = [(n, max(n // ratio, 1)) for n in (1, 2, 4, 8, 16)]
    fits = [share for share in shares if ctas(*share) <= wave]
    assert rows == (fits[0] if fits else shares[-1])
