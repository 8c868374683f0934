"""The append kernel's own code, run lane by lane: what it writes is what the reference writes, and nothing else."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.kv_cache.call import AppendCall, check_append
from cute_kernels.kv_cache.plan import config_of
from cute_kernels.kv_cache.rope import Rope, YarnScaling
from tests.kv_cache.cases import ALL_FORMATS, Shape, assert_appended, clone_caches, general_of, make_call
from tests.kv_cache.simulate import simulate_append
from tests.tensors import among_others, apart

SMALL = Shape(num_q_heads=2, num_kv_heads=1)  # four tokens: two warps of head_dim 128


def check(shape: Shape, rows_per_team: int = 2, **changes) -> None:
    check_call(make_call(shape)._replace(**changes), rows_per_team)


def check_call(call: AppendCall, rows_per_team: int = 2) -> list[AppendCall]:
    """The call as it is launched and, where that is with the kernel for decode, with the one for everything, too."""
    config = config_of(call)
    done = []
    for kernel in dict.fromkeys((config, general_of(config))):
        own = clone_caches(call)
        choice = {"decode": kernel.decode, "lane_columns": kernel.lane_columns}
        q_out = simulate_append(own, rows_per_team, **choice)
        assert_appended(own, call, q_out)
        done.append(own)
    return done


@pytest.mark.parametrize("kv_format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_format_of_both_dtypes(kv_format, dtype):
    """Without RoPE nothing is transformed, so rows are the format's bit for bit."""
    check(SMALL.with_(kv_format=kv_format, dtype=dtype))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("kv_format", ["fp16", "int4_g1", "int4_g8", "int8_g4", "int8_channel", "e5m2"])
def test_every_head_dim(kv_format, head_dim):
    rope = Rope(head_dim)
    check(SMALL.with_(kv_format=kv_format, head_dim=head_dim, rope=rope, new=(1,) * 8), 4)


ROPES = {
    "half": Rope(128),
    "half, partial": Rope(64, theta=1e6),
    "half, pairs across lanes": Rope(36),
    "half, two columns": Rope(2),
    "interleaved": Rope(128, interleaved=True),
    "interleaved, partial": Rope(48, interleaved=True),
    "interleaved, part of a lane": Rope(20, interleaved=True),
    "YaRN, with its attention factor": Rope(128, scaling=YarnScaling(8.0, 2048)),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4"])
def test_every_kind_of_rope(kv_format, rope):
    check(SMALL.with_(kv_format=kv_format, rope=rope, positions="int64"))


@pytest.mark.parametrize(
    ("head_dim", "rope"),
    [(80, Rope(32)), (80, Rope(80, interleaved=True)), (96, Rope(32)), (192, Rope(64)), (64, Rope(8)), (256, Rope(64))],
    ids=str,
)
def test_rope_where_lanes_own_other_runs(head_dim, rope):
    check(SMALL.with_(kv_format="fp16", dtype="fp16", head_dim=head_dim, rope=rope, new=(1,) * 8))


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"), [(192, 128), (128, 192), (64, 256), (256, 64), (80, 256), (96, 192), (80, 64)]
)
def test_values_of_another_head_dim_and_format(head_dim, v_head_dim):
    shape = SMALL.with_(head_dim=head_dim, v_head_dim=v_head_dim, rope=Rope(64), bias=True, new=(1,) * 8)
    check(shape.with_(kv_format=("int8_token_head", "int4_g8")), 4)
    check(shape.with_(kv_format=("e5m2", "e4m3_head")), 1)


PLACES = {
    "pages": {"place": "table", "page_size": 16},
    "pages of 48": {"place": "table", "page_size": 48},
    "heads before tokens": {"place": "table", "layout": "HND"},
    "contiguous": {"place": "contiguous"},
    "contiguous, heads before tokens": {"place": "contiguous", "layout": "HND"},
    "slots": {"place": "slots", "page_size": 48},
    "slots, heads before tokens": {"place": "slots", "layout": "HND"},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("new", [(1, 1, 1, 1), (3, 0, 1, 4), (0, 0, 8, 0)], ids=["decode", "prefill", "one request"])
def test_every_place(place, new):
    check(SMALL.with_(kv_format="int4_g2", new=new, lengths=(40, 100, 47, 49), num_kv_heads=3, **place))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [1, 2, 3], ids=["pages apart", "tokens or heads apart", "rows apart"])
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g2"])
def test_caches_with_gaps_are_written_between_them(kv_format, dim, layout):
    """Of K and V as parts of one tensor; what lies beside them is untouched."""
    shape = SMALL.with_(kv_format=kv_format, new=(3, 0, 1, 4), lengths=(40, 100, 47, 49), layout=layout)
    call = make_call(shape)
    assert call.block_table is not None
    caches, beside = zip(*(among_others(cache, dim) for cache in (call.k_cache, call.v_cache)), strict=True)
    own = call._replace(k_cache=caches[0], v_cache=caches[1], block_table=apart(call.block_table))
    check_append(own)
    assert_appended(own, call, simulate_append(own, 2))
    assert all((x.view(torch.uint8) == 0xFF).all() for x in beside)


@pytest.mark.parametrize("batch", [1, 2, 16, 17, 300])
def test_requests_of_a_prefill_are_found_among_any_number(batch):
    """Most requests are empty, so boundaries coincide; the search takes one, two and three steps."""
    new = tuple(3 if i in (0, batch // 2, batch - 1) else (i * 7) % 5 // 4 for i in range(batch))
    new = (*new[:-1], new[-1] + -sum(new) % 4)  # whole warps
    check(Shape(num_q_heads=1, num_kv_heads=1, new=new, lengths=new, rope=Rope(128)), 4)


@pytest.mark.parametrize("positions", ["int32", "int64"])
@pytest.mark.parametrize("place", ["table", "slots"])
def test_positions_of_their_own_for_rope(positions, place):
    shape = SMALL.with_(kv_format="bf16", rope=Rope(128), positions=positions, place=place)
    check(shape)
    dtype = getattr(torch, positions)
    check(shape, position_ids=torch.tensor([-1, -4000, 2**31 - 1, 0], dtype=dtype))
    if place == "slots":  # lengths are not needed then
        check(shape, seq_lens=None)


@pytest.mark.parametrize("rows_per_team", [1, 2, 4, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(0, 1), (3, 3), (9, 6), (17, 5)])
def test_every_share_of_the_heads(rows_per_team, num_q_heads, num_kv_heads):
    """Shares of fewer, as many and more rows than are in flight; without q there are only k and v."""
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    shape = Shape("int8_g2", rope=Rope(128), bias=True, norm=True, new=(2, 2), **heads)
    check(shape, rows_per_team)


def test_bias_norm_and_rope_in_this_order():
    check(SMALL.with_(kv_format="fp16", dtype="fp16", bias=True, norm=True, rope=Rope(128)))
    check(SMALL.with_(bias=True))
    check(SMALL.with_(norm=True, fused=False), norm_eps=0.1)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4"])
@pytest.mark.parametrize("place", ["table", "slots", "contiguous"])
def test_tokens_without_a_place_are_not_written_and_nothing_else_is_touched(kv_format, place):
    """One team a warp here, so that every token may have another fate."""
    shape = Shape(
        kv_format, num_q_heads=1, num_kv_heads=2, head_dim=256, place=place, rope=Rope(256), lengths=(9, 30, 3, 17)
    )
    call = make_call(shape)
    if place == "table":
        assert call.block_table is not None and call.seq_lens is not None
        call.block_table[0, 0] = -1
        call.block_table[1, 1] = call.num_pages
        call.seq_lens[2] = 33  # one past the table
        call.block_table[3, 1] = 2**31 - 1
    elif place == "slots":
        assert call.slot_mapping is not None
        room = call.num_pages * call.page_size
        call.slot_mapping[:] = call.slot_mapping.new_tensor([-1, room, 2**62, -(2**63)])
    else:
        assert call.seq_lens is not None
        call.seq_lens[:] = call.seq_lens.new_tensor([0, -5, 34, 2**31 - 1])
    for done in check_call(call):
        for got, was in ((done.k_cache, call.k_cache), (done.v_cache, call.v_cache)):
            assert got.view(torch.uint8).equal(was.view(torch.uint8))


def test_tokens_outside_the_bounds_of_a_prefill_are_not_written():
    call = make_call(Shape(num_q_heads=1, num_kv_heads=1, head_dim=256, new=(3, 3)))
    assert call.cu_seqlens is not None
    call.cu_seqlens[:] = call.cu_seqlens.new_tensor([1, 3, 4])
    before = clone_caches(call)
    assert_appended(call, before, simulate_append(call))


@pytest.mark.parametrize("kv_format", [name for name in ALL_FORMATS if name not in ("bf16", "fp16")])
def test_nan_and_infinity_stay_within_their_row_and_are_stored_as_the_format_says(kv_format):
    call = make_call(SMALL.with_(kv_format=kv_format, num_q_heads=0, num_kv_heads=2))
    for x in (call.k, call.v):
        x[0, 0, 3] = torch.nan
        x[1, 1, 7] = torch.inf
        x[2, 0] = -torch.inf
        x[3, 0, ::2] = torch.nan
    check_call(call)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g1", "int4_g4", "int8_g2", "e4m3_token_head", "int8_channel"])
@pytest.mark.parametrize(
    "choice",
    [
        {"decode": False},
        {"lane_columns": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("by_kind", [False, True], ids=["heads before tokens", "tokens before heads"])
def test_choices_that_change_who_does_what_change_no_row(kv_format, choice, by_kind):
    call = make_call(SMALL.with_(kv_format=kv_format, num_q_heads=9, num_kv_heads=3, rope=Rope(128), new=(1,) * 8))
    before = clone_caches(call)
    q_out = simulate_append(call, rows_per_team=8, by_kind=by_kind, **choice)
    assert_appended(call, before, q_out)


@pytest.mark.parametrize(
    ("kv_format", "head_dim"),
    [(name, 128) for name in ALL_FORMATS]
    + [(name, d) for name in ("bf16", "int4_g1", "int4_g8", "int8_channel", "e4m3_head") for d in (64, 256)],
)
def test_decode_with_pairs_in_one_lane(kv_format, head_dim):
    """With 8 columns to a lane, 4 of each half of the row, every group is whole lanes still."""
    shape = SMALL.with_(kv_format=kv_format, head_dim=head_dim, rope=Rope(head_dim), new=(1,) * 8, num_kv_heads=3)
    assert config_of(make_call(shape)).lanes == head_dim // 8
    check(shape, 4)


@pytest.mark.parametrize(
    "kv_format",
    ["int8_head", "e4m3_head", "int8_tensor", "int8_channel", ("e4m3_head", "int8_channel"), ("bf16", "int8_head"),
     ("int8_tensor", "int4_g1")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rows_per_team", [2, 4, 10], ids=["one row", "as many as in flight", "more"])
def test_every_row_meets_the_given_scale_of_its_head(kv_format, rows_per_team):
    """Scales of one number are asked for with the rows; those of 7 heads, no two of which are alike."""
    check(Shape(kv_format, num_q_heads=3, num_kv_heads=7, rope=Rope(128)), rows_per_team)
