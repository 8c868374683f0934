"""What extend attention's launcher keeps and what it looks at again, with CPU tensors for CUDA ones."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from bench.configured import bind_config
from cute_kernels.attention import decode_attention, extend_attention, ops, ragged
from cute_kernels.attention.arguments import COMBINE, EXTEND, UNPACK
from cute_kernels.attention.call import make_extend_call
from cute_kernels.attention.checks import MAX_TOKENS
from cute_kernels.attention.extend_schedule import MAX_UNPACKED_BYTES, choose, key_rows_of
from cute_kernels.attention.options import NO_EXTEND_OPTIONS
from cute_kernels.attention.plan import extend_launches, problem_of, specs_of
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.ragged import ragged_attention
from cute_kernels.formats.kv import format_of
from cute_kernels.runtime.launch_arguments import LaunchArguments
from tests.extend import cases
from tests.launchers import Launch, recording
from tests.observed import calls_of


@pytest.fixture
def launches():
    """What would be launched."""
    with recording() as recorded:
        yield recorded.launches


def given(num_queries: int, **options: Any) -> dict[str, Any]:
    cache = torch.zeros(2, 128, 2, 64).bfloat16()
    return {
        "q": torch.zeros(num_queries, 4, 64).bfloat16(),
        "k_cache": cache,
        "v_cache": cache,
        "seq_lens": torch.tensor([100, 50], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, num_queries // 2, num_queries], dtype=torch.int32),
        "kv_format": "bf16",
        **options,
    }


def test_a_plan_serves_any_number_of_queries(launches):
    out = extend_attention(**given(6))
    with calls_of(ops.make_plan, ops.make_extend_call) as repeated:
        assert extend_attention(**given(40)).shape == (40, 4, 64) and out.shape == (6, 4, 64)
    assert not repeated
    assert len(launches) == 2 and len(ops.launch.plans) == 1


def test_no_queries_are_checked_and_not_launched(launches):
    extend_attention(**given(6))
    assert extend_attention(**given(0)).shape == (0, 4, 64)
    changed: dict[str, Any] = {**given(0), "seq_lens": torch.zeros(2)}
    with pytest.raises(TypeError, match="seq_lens"):
        extend_attention(**changed)
    assert len(launches) == 1 and len(ops.launch.plans) == 1


def test_queries_of_other_dimensions_are_refused_in_the_checks_words(launches):
    extend_attention(**given(6))
    for dimensions in (0, 1, 2, 4):
        with pytest.raises(ValueError, match=f"q: got {dimensions} dimensions, want 3"):
            extend_attention(**given(6, q=torch.zeros((6,) * dimensions).bfloat16()))
    assert len(launches) == 1


def test_what_belongs_to_the_queries_is_counted_in_every_call(launches):
    new = torch.zeros(6, 2, 64).bfloat16()
    extend_attention(**given(6, new_k=new, new_v=new))
    count = len(launches)
    with pytest.raises(ValueError, match="new_k"):
        extend_attention(**given(6, new_k=new[:5], new_v=new))
    with pytest.raises(ValueError, match="new_v"):
        extend_attention(**given(6, new_k=new, new_v=new[:5]))
    assert len(launches) == count


def test_a_scale_that_is_none_is_refused_by_name(launches):
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softmax_scale"):
            extend_attention(**given(6, softmax_scale=scale))
    with pytest.raises(TypeError, match="softmax_scale"):
        extend_attention(**given(6, softmax_scale="half"))
    assert not launches


def test_new_tokens_may_be_seen_through_a_window_wider_than_any_request(launches):
    """It fits the 32 bits of the launches' argument."""
    new = torch.zeros(6, 2, 64).bfloat16()
    for window in (2**31, 10**30, (2**31 - 1, 0)):
        extend_attention(**given(6, new_k=new, new_v=new, window_size=window))
    assert len(launches) == 6 and len(ops.launch.plans) == 1
    of_window = EXTEND.names.index("window")
    assert {launch.arguments[of_window] for launch in launches} == {MAX_TOKENS}


def test_ragged_calls_have_plans_of_their_own(launches):
    q, k = torch.zeros(8, 4, 64).bfloat16(), torch.zeros(20, 2, 64).bfloat16()
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 9, 20], dtype=torch.int32)
    for _ in range(2):
        out, lse = ragged.launch((q, k, k, *bounds, None, NO_EXTEND_OPTIONS))
        assert out.shape == q.shape and lse.shape == (8, 4)
    assert len(launches) == 2 and len(ragged.launch.plans) == 1
    out, lse = ragged.launch((q, k[:0], k[:0], *bounds, None, NO_EXTEND_OPTIONS))
    assert not out.any() and (lse == -torch.inf).all() and len(launches) == 2
    with pytest.raises(ValueError, match="softmax_scale: got -1, want None"):
        ragged_attention(q, k, k, *bounds, softmax_scale=-1)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        ragged.launch((q, k, k, bounds[0], bounds[1][:0], None, NO_EXTEND_OPTIONS))
    assert ragged_attention(q, k, k, *bounds)[0].shape == q.shape  # on the CPU


def symbols(launches) -> list[str]:
    return [launch.symbol for launch in launches]


def coded(num_queries: int, tokens: int = 256, **options: Any) -> dict[str, Any]:
    cache = torch.zeros(2, tokens, 2, 68, dtype=torch.uint8)
    return given(num_queries, k_cache=cache, v_cache=cache, kv_format="int8_token_head", **options)


def test_many_queries_over_codes_are_served_over_unpacked_keys(launches):
    extend_attention(**coded(6))
    assert not any("unpack" in symbol for symbol in symbols(launches))
    launches.clear()
    extend_attention(**coded(4000))
    unpack, attention = launches
    assert unpack.symbol.startswith("extend_unpack_int8") and attention.symbol.endswith("_unpacked")
    assert len(ops.launch.plans) == 1, "the same plan serves both"
    k_rows, v_rows = unpack.arguments[2:4]
    assert k_rows.shape == v_rows.shape == (2, 2, 256, 64) and k_rows.dtype == torch.float16
    assert attention.arguments[1] is k_rows and attention.arguments[2] is v_rows


def test_what_the_caller_knows_of_lengths_bounds_unpacked_keys(launches):
    for most, room in ((100, 128), (129, 256), (10**6, 256), (None, 256)):
        launches.clear()
        extend_attention(**coded(4000, max_seq_len=most))
        assert launches[0].arguments[2].shape[2] == room
    assert len(ops.launch.plans) == 1, "lengths change from step to step"
    with pytest.raises(ValueError, match="max_seq_len"):
        extend_attention(**coded(4000, max_seq_len=0))


def test_unpacked_keys_take_no_more_memory_than_is_theirs(launches):
    too_many = MAX_UNPACKED_BYTES // (2 * 2 * 2 * 64 * 2) + 128
    table = torch.zeros(2, too_many // 64 + 1, dtype=torch.int32)
    pages = torch.zeros(3, 64, 2, 68, dtype=torch.uint8)
    call: dict[str, Any] = coded(4000) | {"k_cache": pages, "v_cache": pages, "block_table": table}
    extend_attention(**call)
    assert len(launches) == 1 and "unpack" not in launches[0].symbol
    launches.clear()
    call["max_seq_len"] = 256
    extend_attention(**call)
    assert len(launches) == 2 and "unpack" in launches[0].symbol
    launches.clear()
    del call["max_seq_len"]
    extend_attention(**call, unpack=True)
    assert len(launches) == 2, "the caller has asked for it"


def test_the_caller_says_whether_keys_are_unpacked(launches):
    extend_attention(**coded(6, unpack=True))
    assert len(launches) == 2
    extend_attention(**coded(4000, unpack=False))
    assert len(launches) == 3 and "unpack" not in launches[2].symbol
    with pytest.raises(TypeError, match="unpack"):
        extend_attention(**coded(6, unpack="yes"))


def test_a_window_lets_too_few_queries_see_a_key_for_it_to_be_unpacked(launches):
    extend_attention(**coded(4000, window_size=100))
    assert not any("unpack" in symbol for symbol in symbols(launches))


def test_fp8_products_are_made_however_few_queries_there_are(launches):
    cache = torch.zeros(2, 256, 2, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(())
    call = given(6, q=torch.zeros(6, 4, 128).bfloat16(), k_cache=cache, v_cache=cache, k_scale=scale, v_scale=scale)
    call["kv_format"] = "e4m3_tensor"
    extend_attention(**call)
    assert len(launches) == 1 and "fp8" not in launches[0].symbol
    launches.clear()
    for num_splits in (None, 2):
        extend_attention(**call, fp8_products=True, num_splits=num_splits)
    unpack, attention, *_ = launches
    assert unpack.symbol == "extend_unpack_e4m3_tensor_e4m3_d128" and "_unpacked_fp8" in attention.symbol
    assert unpack.arguments[2].dtype == torch.uint8 and unpack.arguments[2].shape == (2, 2, 256, 128)
    assert [symbol for symbol in symbols(launches) if symbol.startswith("extend_unpack")] == [unpack.symbol] * 2


def test_with_fixed_splits_rows_scales_are_read_as_they_are(launches):
    """Whatever else is in the batch; other formats give the same bits either way."""
    extend_attention(**coded(4000, num_splits=1))
    assert len(launches) == 1
    cache = torch.zeros(2, 256, 2, 36, dtype=torch.uint8)
    extend_attention(**coded(4000, num_splits=1) | {"k_cache": cache, "v_cache": cache, "kv_format": "int4_g1"})
    assert len(launches) == 3 and launches[1].symbol.startswith("extend_unpack")


def test_what_a_configuration_s_calls_may_launch_can_be_prepared():
    with recording() as recorded:
        extend_attention(**coded(6))
        loaded = {spec for spec, _ in recorded.loaded}
    config = choose(problem_of(make_extend_call(**coded(6))))
    assert loaded == set(specs_of(config)) and len(loaded) == 4
    assert len(specs_of(config, splits=False)) == 3


def test_what_no_call_would_be_served_by_is_not_compiled():
    for options in ({"unpack": True}, {"unpack": True, "num_splits": 1}):
        with recording() as recorded:
            extend_attention(**coded(6, **options))
        names = [spec.symbol for spec, _ in recorded.loaded if not spec.symbol.startswith("extend_combine")]
        assert len(names) == 2 and names[0].startswith("extend_unpack") and names[1].endswith("_unpacked"), options


@pytest.mark.parametrize("unpack", [False, True])
def test_block_tables_whose_rows_lie_apart_are_copied(unpack, launches):
    """For every launch that reads one; the caller's own stays as it is."""
    pages, table = torch.zeros(9, 64, 2, 68, dtype=torch.uint8), torch.arange(8, dtype=torch.int32).view(2, 4)[:, :3]
    call: dict[str, Any] = coded(6000, block_table=table, unpack=unpack) | {"k_cache": pages, "v_cache": pages}
    before = dict(call)
    extend_attention(**call)
    found = by_name(UNPACK if unpack else EXTEND, launches[0])
    assert found["block_table"] not in (0, table.data_ptr()) and found["max_pages"] == 3
    assert call.keys() == before.keys() and all(call[name] is before[name] for name in call)


def by_name(declared: LaunchArguments, launch: Launch) -> dict[str, Any]:
    return dict(zip(declared.names, launch.arguments, strict=True))


def test_every_number_of_a_launch_stands_where_the_kernel_takes_it(launches):
    """By the declared names: the compiler gives the kernel the same ones."""
    pages, table = torch.zeros(9, 64, 2, 64).bfloat16(), torch.zeros(2, 3, dtype=torch.int32)
    sinks, slopes, mask = torch.zeros(4), torch.zeros(4), torch.zeros(6, 1, dtype=torch.int32)
    call = given(6, k_cache=pages, v_cache=pages, block_table=table, num_splits=2, softmax_scale=0.25)
    extend_attention(**call, window_size=9, softcap=3.0, sinks=sinks, alibi_slopes=slopes)
    attention, combine = launches
    found = by_name(EXTEND, attention)
    numbers = {"max_pages": 3, "window": 9, "soft_cap": 3.0, "softmax_scale": 0.25, "num_splits": 2, "lse": 0}
    numbers |= {"prefix_only": 0, "k_scale": 0, "v_scale_stride": 0, "tree_mask": 0, "tree_words": 0, "tile_scales": 0}
    numbers |= {"block_table": table.data_ptr(), "sinks": sinks.data_ptr(), "alibi_slopes": slopes.data_ptr()}
    assert {name: found[name] for name in numbers} == numbers and found["num_ctas"] == 2 * 2 * 2
    assert found["cu_seqlens"] is call["cu_seqlens_q"] and found["seq_lens"] is call["seq_lens"]
    found = by_name(COMBINE, combine)
    assert found["values"] and (found["sinks"], found["num_parts"], found["lse"]) == (sinks.data_ptr(), 2, 0)
    assert (found["value_stride"], found["sum_stride"]) == (4 * 6 * 4 * 64, 4 * 6 * 4)  # fp32 of 6 queries, 4 heads
    assert found["sums"] == found["values"] + 2 * found["value_stride"]
    assert found["last"] == call["cu_seqlens_q"].data_ptr() + 4 * 2  # the end of two requests
    launches.clear()
    del call["num_splits"]
    extend_attention(**call, tree_mask=mask)
    found = by_name(EXTEND, launches[0])
    assert (found["tree_mask"], found["tree_words"], found["soft_cap"]) == (mask.data_ptr(), 1, 1.0)


def test_every_number_of_unpacking_stands_where_its_kernel_takes_it(launches):
    extend_attention(**coded(4000, max_seq_len=100, unpack=True, window_size=9))
    unpack, attention = by_name(UNPACK, launches[0]), by_name(EXTEND, launches[1])
    numbers = {"max_pages": 0, "total_q": 4000, "max_seq_len": 100, "window": 9, "prefix_only": 0, "block_table": 0}
    assert {name: unpack[name] for name in numbers} == numbers
    assert unpack["tile_scales"] == attention["tile_scales"] != 0 and attention["max_pages"] == 100


BATCH = 20  # requests of 2 KV heads: 40 work tiles at least


def narrow(q_len: int, kv_format: str = "e4m3_tensor", batch: int = BATCH, **options: Any) -> dict[str, Any]:
    """Requests of equally many queries over codes of head_dim 128, 2 heads a group."""
    cache = torch.zeros(batch, 256, 2, format_of(kv_format).row_bytes(128), dtype=torch.uint8)
    scale = torch.ones(()) if format_of(kv_format).given_scale else None
    return {
        "q": torch.zeros(batch * q_len, 4, 128).bfloat16(),
        "k_cache": cache,
        "v_cache": cache,
        "seq_lens": torch.full((batch,), 200, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32) * q_len,
        "kv_format": kv_format,
        "k_scale": scale,
        "v_scale": scale,
        **options,
    }


def columns_of(launches) -> str:
    (launch, *_) = launches
    return launch.symbol.rpartition("_")[2]


def test_few_queries_over_codes_are_columns_of_products(launches):
    for q_len, columns in ((1, "q40"), (20, "q40"), (21, "q72"), (36, "q72"), (37, "causal"), (200, "causal")):
        launches.clear()
        extend_attention(**narrow(q_len))
        assert columns_of(launches) == columns, q_len
    launches.clear()
    extend_attention(**narrow(17, batch=2))
    assert columns_of(launches) == "causal", "few work tiles"


@pytest.mark.parametrize(
    "kv_format, columns",
    [("int4_g4", "causal"), ("int4_g1", "q40"), ("e4m3_tensor", "causal"), ("int8_token_head", "causal")],
)
def test_rows_that_begin_between_pieces_of_16_bytes_are_not_copied_by_them(kv_format, columns, launches):
    """Rows with a header may begin at any word, and so may any cache of bytes."""
    call = narrow(17, kv_format)
    rows = call["k_cache"].shape[3]
    if kv_format in ("e4m3_tensor", "int8_token_head"):
        moved = torch.zeros(call["k_cache"].numel() + 16, dtype=torch.uint8)[4:]
        call["v_cache"] = moved[: call["k_cache"].numel()].view(call["k_cache"].shape)
    else:
        call["v_cache"] = torch.zeros(*call["k_cache"].shape[:3], rows + 4, dtype=torch.uint8)[..., :rows]
    extend_attention(**call)
    assert columns_of(launches) == columns


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["int8_token_head", "e4m3_token_head", "int4_g4", "int4_g1", "e4m3_tensor"])
def test_tensor_maps_bring_rows_where_they_have_them(kv_format, layout, kv_heads, launches):
    """Rows of 132 and of 68 bytes as those of a token, if these are a multiple of 16; rows of 80 bytes anyhow. Headers
    that lie apart are none of theirs, and rows of codes alone need no word about it."""
    rows = format_of(kv_format).row_bytes(128)
    shape = (BATCH, 256, kv_heads, rows) if layout == "NHD" else (BATCH, kv_heads, 256, rows)
    cache = torch.zeros(shape, dtype=torch.uint8)
    q = torch.zeros(BATCH * 6, 2 * kv_heads, 128).bfloat16()
    call = narrow(6, kv_format, cache_layout=layout)
    call |= {"q": q, "k_cache": cache, "v_cache": cache}
    extend_attention(**call)
    behind = kv_format.endswith("token_head") or kv_format == "int4_g1"
    mapped = kv_format == "int4_g4" or (behind and layout == "NHD" and kv_heads == 4)
    assert columns_of(launches) == "q40" and ("_mapped" in launches[0].symbol) == mapped


def test_heads_that_lie_apart_are_not_one_row_of_a_token(launches):
    call = narrow(6, "int8_token_head")
    wide = torch.zeros(BATCH, 256, 2, 136, dtype=torch.uint8)[..., :132]
    call |= {"k_cache": wide, "v_cache": wide}
    extend_attention(**call)
    assert columns_of(launches) == "q40" and "_mapped" not in launches[0].symbol
    checked = make_extend_call(**call)
    config = key_rows_of(choose(problem_of(checked)), mapped=True)
    with pytest.raises(ValueError, match=r"k_cache, v_cache: .*_mapped_q72 wants .* one behind the other"):
        extend_launches(checked, config)


@pytest.mark.parametrize("kv_heads", [2, 3, 5, 6])
def test_a_work_tile_has_two_heads_unless_one_would_be_left_over(kv_heads, launches):
    """Some heads of a wider cache, whose tokens begin at multiples of 16 bytes."""
    call = narrow(6, "int8_token_head")
    some = torch.zeros(BATCH, 256, 8, 132, dtype=torch.uint8)[:, :, :kv_heads]
    call |= {"q": torch.zeros(BATCH * 6, 2 * kv_heads, 128).bfloat16(), "k_cache": some, "v_cache": some}
    extend_attention(**call)
    assert f"_t{128 if kv_heads % 2 else 64}r" in launches[0].symbol and "_mapped" in launches[0].symbol
    checked = make_extend_call(**call)
    config = key_rows_of(choose(problem_of(checked)), mapped=True, tile_heads=2)
    if kv_heads % 2:
        with pytest.raises(ValueError, match=rf"got {kv_heads} KV heads: config .* wants a multiple of 2"):
            extend_launches(checked, config)


@pytest.mark.parametrize("kv_format", ["e4m3_tensor", "int8_token_head"])
def test_a_given_configuration_refuses_caches_that_it_cannot_bring(kv_format, launches):
    call = narrow(6, kv_format)
    moved = torch.zeros(call["k_cache"].numel() + 16, dtype=torch.uint8)[4:]
    call["k_cache"] = moved[: call["k_cache"].numel()].view(call["k_cache"].shape)
    checked = make_extend_call(**call)
    config = key_rows_of(choose(problem_of(checked)))
    with pytest.raises(ValueError, match=r"k_cache, v_cache: .*_q72 wants .* multiples of 16 bytes"):
        extend_launches(checked, config)
    assert not launches


@pytest.mark.parametrize(
    "options",
    [
        {"num_splits": 1},  # a request's bits must not depend on its batch
        {"softcap": 3.0},
        {"alibi_slopes": torch.zeros(4)},
        {"unpack": True},
        {"fp8_products": True},
        {"kv_format": "int4_g8"},
    ],
    ids=str,
)
def test_what_key_rows_do_not_take_is_served_as_before(options, launches):
    extend_attention(**narrow(6, **options))
    assert launches and not any("_q" in symbol for symbol in symbols(launches))


def test_key_rows_take_trees_and_leave_new_tokens_to_another_launch(launches):
    extend_attention(**narrow(6, tree_mask=torch.zeros(6 * BATCH, 1, dtype=torch.int32)))
    assert launches[0].symbol.endswith("_tree_q40")
    assert by_name(EXTEND, launches[0])["tree_words"] == 1
    launches.clear()
    new = torch.zeros(6 * BATCH, 2, 128).bfloat16()
    extend_attention(**narrow(6, new_k=new, new_v=new))
    older, newer = launches
    assert older.symbol.endswith("_q40") and newer.symbol.endswith("_merges")
    assert by_name(EXTEND, older)["prefix_only"] == 1


def test_work_tiles_of_key_rows_are_counted_as_theirs(launches):
    """72 rows of each of two KV heads, of 35 queries of 2 heads, and one place more for each request."""
    extend_attention(**narrow(35, batch=17, max_seq_len=100))
    found = by_name(EXTEND, launches[0])
    assert found["num_ctas"] == min((17 * 70 // 72 + 17) * found["num_splits"], 132) == 33


def test_a_configuration_that_is_given_serves_all_calls(launches):
    call = narrow(6)
    config = choose(problem_of(make_extend_call(**call)))
    tensors = [call.pop(name) for name in ("q", "k_cache", "v_cache", "seq_lens")]
    bind_config(config, *tensors, out=torch.zeros_like(tensors[0]), **call)()
    assert columns_of(launches) == "causal"


def extend(call: dict[str, Any]) -> torch.Tensor:
    return extend_attention(**call)


def test_queries_that_lie_apart_have_the_plan_of_all_others(launches):
    """However far apart, and whatever their number."""
    rows = torch.zeros(40, 4 + 2 * 2, 64).bfloat16()
    for count in (6, 40, 1):
        q = rows[:count, :4]
        call = given(6) | {"q": q, "cu_seqlens_q": torch.tensor([0, 0, count], dtype=torch.int32)}
        out = extend(call)
        assert out.is_contiguous()
        assert launches[-1].arguments[0].data_ptr() == rows.data_ptr(), "no copy"
    assert len(launches) == 3
    extend_attention(**given(6))
    assert launches[-1].symbol == launches[0].symbol and len(ops.launch.plans) == 1
    with pytest.raises(ValueError, match="q: got strides"):
        extend(given(6) | {"q": torch.zeros(6, 260).bfloat16()[:, :256].unflatten(1, (4, 64))})


def test_new_tokens_may_lie_apart(launches):
    rows = torch.zeros(6, 4 + 2 * 2, 64).bfloat16()
    q, k, v = rows.split((4, 2, 2), dim=1)
    extend(given(6, new_k=k, new_v=v) | {"q": q})
    _, newer = launches
    assert newer.symbol.endswith("_ragged_merges")
    assert [x.data_ptr() for x in newer.arguments[:3]] == [x.data_ptr() for x in (q, k, v)], "no copies"
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    out, _ = ragged.launch((q, k, v, bounds, bounds, None, NO_EXTEND_OPTIONS))
    assert out.is_contiguous() and launches[-1].symbol.endswith("_ragged")
    assert launches[-1].arguments[1].data_ptr() == k.data_ptr()


@pytest.mark.parametrize("k_format, v_format", [("bf16", "int8_token_head"), ("int8_token_head", "bf16")])
def test_where_k_or_v_is_of_16_bits_alone_both_are_read_as_they_lie(launches, k_format, v_format):
    call: dict[str, Any] = coded(4000) | {"kv_format": (k_format, v_format)}
    dense, codes = torch.zeros(2, 256, 2, 64).bfloat16(), call["k_cache"]
    call |= {"k_cache": dense, "v_cache": codes} if k_format == "bf16" else {"k_cache": codes, "v_cache": dense}
    extend_attention(**call)
    (launch,) = launches
    assert launch.symbol.startswith(f"extend_{k_format}_{v_format}_bf16_d64") and "unpacked" not in launch.symbol
    for given_cache, cache in zip(launch.arguments[1:3], (call["k_cache"], call["v_cache"]), strict=True):
        assert given_cache.data_ptr() == cache.data_ptr() and given_cache.dtype == cache.dtype
    with pytest.raises(ValueError, match="unpack: got True"):
        extend_attention(**call, unpack=True)


FILLERS: dict[tuple[str, str], tuple[int, int]] = {
    ("bf16", "bf16"): (1, 1),
    ("int4_g4", "int4_g4"): (4, 4),
    ("int8_tensor", "bf16"): (4, 1),
}


@pytest.mark.parametrize("formats", FILLERS)
def test_who_says_that_a_tile_is_there(formats):
    """Also K's warps of V's powers of 2, which come with K's tile."""
    keys, values = formats
    config = choose(AttentionProblem.ragged(128, keys, values, "bf16", 64))
    assert config.tile_fillers == FILLERS[formats] and config.can_implement() is None
    scaled = choose(AttentionProblem.ragged(128, "bf16", "int8_token_head", "bf16", 64))
    assert scaled.tile_fillers == (4, 4) and scaled.scale_runs == 4 and scaled.operand_types == ("bf16", "fp16")


@pytest.mark.parametrize("decodes", [False, True])
def test_a_kept_plan_keeps_no_tensor_of_its_call(decodes: bool):
    """Above all no cache. Plans of extend attention have several algorithms, key rows among them."""
    with recording() as recorded:
        call = cases.make_call("e4m3_tensor", [1, 1] if decodes else [4, 6], [300, 500])
        if decodes:
            q, *cache = call.tensors
            options = {name: value for name, value in call.keywords.items() if name != "cu_seqlens_q"}
            decode_attention(q.unsqueeze(1), *cache, **options)
            del q, cache, options
        else:
            extend_attention(*call.tensors, **call.keywords)
            assert any(getattr(spec.config, "key_rows", None) is not None for spec, _ in recorded.loaded)
        recorded.launches.clear()
        alive = [weakref.ref(tensor) for tensor in call.tensors]
        del call
        gc.collect()
        assert [each() for each in alive] == [None] * len(alive)
