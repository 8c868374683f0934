"""The append kernel with a cache transform, its own code lane by lane: rows are those of k' and v', q is q'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.kv_cache.call import AppendCall, check_append
from cute_kernels.kv_cache.config import AppendConfig, RowTransform, other_rotation
from cute_kernels.kv_cache.plan import check_alignment, config_of
from cute_kernels.kv_cache.reference import places, shifts, transform
from cute_kernels.kv_cache.rope import Rope
from tests.kv_cache.cases import ALL_FORMATS, Shape, assert_appended, clone_caches, general_of, make_call
from tests.kv_cache.simulate import simulate_append
from tests.kv_cache.transformed import make_transform, with_transform

SMALL = Shape("int4_g4", num_q_heads=4, num_kv_heads=2)


def check(shape: Shape, shift: bool = True, rows_per_team: int = 2, **of_transform: Any) -> None:
    """Both kernels, for decode and for everything, give what the reference does; no transform would not."""
    given = make_transform(shape.num_kv_heads, shape.head_dim, shape.v_head_dim, **of_transform)
    call = with_transform(make_call(shape), given, shift)
    check_append(call)
    config = config_of(call)
    assert config.transform is not None
    for kernel in dict.fromkeys((config, general_of(config))):
        own = clone_caches(call)
        choice = {"decode": kernel.decode, "lane_columns": kernel.lane_columns}
        q_out = simulate_append(own, rows_per_team, **choice)
        assert_appended(own, call, q_out)
        assert_shifted(own)


def assert_shifted(call: AppendCall) -> None:
    """The shifts are q . k_center of what bias, norm and RoPE have made of q."""
    if call.q_shift is None:
        return
    want = shifts(call, transform(call._replace(transform=None), places(call)[0], torch.float64)[0])
    scale = want.abs().amax().clamp(min=1)
    assert (call.q_shift - want).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_every_format_bit_for_bit(kv_format):
    """Without RoPE the kernel's fp32 is the reference's, so that rows are equal to the bit."""
    dtype = "fp16" if kv_format == "fp16" else "bf16"
    check(SMALL.with_(kv_format=kv_format, dtype=dtype), k_rotation=128, v_rotation=128)


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "no rope"])
@pytest.mark.parametrize(
    ("head_dim", "k_rotation"),
    [(128, width) for width in (2, 8, 16, 32, 64, 128)] + [(d, width) for d in (64, 256) for width in (2, 16, d)],
)
def test_every_width_and_the_ends_of_every_head_dim(head_dim, k_rotation, rope):
    """With RoPE over the whole head lanes own two runs of columns, else one."""
    shape = SMALL.with_(head_dim=head_dim, rope=Rope(head_dim) if rope else None, new=(1,) * 8)
    check(shape, k_rotation=k_rotation, v_rotation=min(2 * k_rotation, head_dim))


@pytest.mark.parametrize("head_dim", [80, 96, 192])
def test_head_dims_that_are_no_power_of_two_are_centred_and_scaled(head_dim):
    check(SMALL.with_(head_dim=head_dim, rope=Rope(32), new=(1,) * 8), rows_per_team=4)


@pytest.mark.parametrize("parts", ["", "center", "factor", "v_factor", "center factor"])
def test_any_part_may_be_missing(parts):
    shape = SMALL.with_(rope=Rope(128), kv_format=("int4_g4", "int8_token_head"))
    check(shape, parts=parts, k_rotation=32)
    if parts:
        check(shape, parts=parts, shift=False)
    check(shape, parts=parts, v_rotation=16)


def test_values_of_another_head_dim():
    shape = SMALL.with_(head_dim=256, v_head_dim=64, rope=Rope(64), bias=True, new=(1,) * 8)
    check(shape, k_rotation=256, v_rotation=64)
    check(shape.with_(head_dim=64, v_head_dim=128, rope=None), k_rotation=64, v_rotation=4)
    check(shape.with_(head_dim=192, v_head_dim=128), v_rotation=128)


PLACES = {
    "pages": {"place": "table"},
    "heads before tokens": {"place": "table", "layout": "HND"},
    "contiguous": {"place": "contiguous"},
    "slots": {"place": "slots", "positions": "int64"},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("new", [(1, 1, 1, 1), (3, 0, 1, 4)], ids=["decode", "prefill"])
def test_every_place_with_bias_norm_and_rope(place, new):
    shape = SMALL.with_(new=new, lengths=(40, 100, 47, 49), rope=Rope(128), bias=True, norm=True, **place)
    check(shape, k_rotation=64)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(0, 3), (3, 3), (6, 2), (9, 3), (20, 4)])
@pytest.mark.parametrize("rows_per_team", [1, 4, 16])
def test_every_q_head_has_the_constants_of_its_kv_head(num_q_heads, num_kv_heads, rows_per_team):
    shape = SMALL.with_(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, rope=Rope(128), new=(2, 2))
    check(shape, rows_per_team=rows_per_team, k_rotation=128)


def test_a_channel_that_drowns_the_others_is_written_as_exactly_as_the_format_can():
    """Centred and rotated; `assert_appended` holds the rows to the format's error of k', which has no such channel."""
    call = make_call(SMALL.with_(kv_format="int4_g1", new=(1,) * 4))
    call.k[..., 5] = 100 + call.k[..., 5]
    given = make_transform(2, 128, k_rotation=128, parts="center")
    assert given.k_center is not None
    given.k_center[:, 5] = 100
    call = with_transform(call, given)
    own = clone_caches(call)
    assert_appended(own, call, simulate_append(own))
    k = call.formats[0].dequantize(own.k_cache, 128, torch.float64)
    _, pages, rows = places(call)
    error = (given.original_keys(k[pages, rows]) - call.k.double()).norm() / call.k.double().norm()
    assert error < 0.03


def test_rotations_that_lanes_cannot_make_are_refused_by_name():
    call = with_transform(make_call(SMALL.with_(head_dim=96)), make_transform(2, 96, k_rotation=32))
    check_append(call)  # the reference does it
    with pytest.raises(ValueError, match="transform: got k_rotation 32, want 1 with a head_dim of 96"):
        check_alignment(call)
    assert other_rotation(1, 96) is other_rotation(64, 64) is other_rotation(128, 256) is None
    assert other_rotation(48, 96) and other_rotation(128, 64) and other_rotation(0, 64)
    base = AppendConfig.alike("int4_g4", "bf16", 128)
    assert replace(base, transform=RowTransform(v_rotation=12)).can_implement()
    assert replace(base, transform=RowTransform(shift=True)).can_implement() == "a shift is what a center takes off"
    assert replace(base, transform=RowTransform(center=True, shift=True, v_rotation=32)).can_implement() is None
