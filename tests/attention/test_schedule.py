"""Every problem gets a schedule that compiles and covers each query head once; known ones get the measured best."""

import dataclasses
import functools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import shipped_specs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.decode_schedule import (
    estimate_us,
    expected_costs,
    make_schedule,
    most_combiners,
    ranges_of,
    split_options,
)
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.tiles import cannot_read, kernel_format
from cute_kernels.formats.kv import FORMATS as ALL_FORMATS
from cute_kernels.formats.kv import HEAD_DIMS, format_of
from cute_kernels.formats.scores.features import Features
from layouts.kv.tile import RowTile
from tests.attention.cut_rows import units_of_ctas
from tests.each import each

FORMATS = ["bf16", "fp16", "int4_g1", "int4_g2", "int4_g4", "int4_g8"]
BYTE_FORMATS = ["int8_token_head", "int8_tensor", "int8_head", "int8_channel", "e4m3_token_head", "e4m3_head", "e5m2"]


def issue_problem(kv_format: str, batch: int) -> AttentionProblem:
    """8 query heads on one KV head of 128, 8192 tokens: the shapes of the published INT4 decode benchmarks."""
    return AttentionProblem.uniform(batch, 8192, 8, 1, 128, kv_format, "bf16")


@st.composite
def problems(draw, formats=tuple(ALL_FORMATS), mixed: bool = True) -> AttentionProblem:
    """Shapes that the kernels read; ``mixed``: K and V may differ."""
    names = [draw(st.sampled_from(formats)) for _ in range(2)]
    dims = [draw(st.sampled_from(HEAD_DIMS)) for _ in range(2)]
    if not mixed or draw(st.booleans()):
        names[1], dims[1] = names[0], dims[0]
    dense = {"bf16", "fp16"} & set(names)
    assume(len(dense) < 2)
    assume(not any(cannot_read(format_of(name), d) for name, d in zip(names, dims, strict=True)))
    num_kv_heads = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 128])))
    return AttentionProblem(
        batch=draw(st.one_of(st.integers(1, 64), st.integers(1, 65535))),
        max_seq_len=draw(st.one_of(st.integers(1, 300), st.integers(1, 1 << 20))),
        num_q_heads=num_kv_heads * draw(st.one_of(st.integers(1, 16), st.sampled_from([24, 32, 64, 128]))),
        num_kv_heads=num_kv_heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        k_format=names[0],
        v_format=names[1],
        q_dtype=dense.pop() if dense else draw(st.sampled_from(["bf16", "fp16"])),
        aligned=draw(st.booleans()),
        num_sms=draw(st.sampled_from([132, 114, 78, 16])),
    )


def heads_of_cta(problem: AttentionProblem, config: DecodeConfig, block: int) -> list[int]:
    """Query heads of head block ``block``, as the kernel numbers them."""
    query_groups = -(-problem.group // config.head_queries)
    first_kv = block // query_groups * config.mainloop.num_heads
    first_query = block % query_groups * config.head_queries
    return [
        (first_kv + kv) * problem.group + query
        for kv in range(config.mainloop.num_heads)
        for query in range(first_query, first_query + config.head_queries)
        if query < problem.group
    ]


# -- any problem -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(problems(), st.one_of(st.none(), st.integers(1, 64)))
def test_every_problem_gets_a_schedule_that_can_be_compiled(problem: AttentionProblem, num_splits: int | None):
    schedule = make_schedule(problem, num_splits)
    config = schedule.config
    assert config.can_implement() is None
    assert config.format_names == (kernel_format(problem.k_format), kernel_format(problem.v_format))
    assert config.q_dtype == problem.q_dtype and config.head_dims == (problem.head_dim, problem.v_head_dim)
    assert problem.num_kv_heads % config.mainloop.num_heads == 0


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_head_blocks_cover_every_query_head_once(problem: AttentionProblem):
    schedule = make_schedule(problem)
    heads = [head for block in range(schedule.head_blocks) for head in heads_of_cta(problem, schedule.config, block)]
    assert sorted(heads) == list(range(problem.num_q_heads))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_splits_are_bounded(problem: AttentionProblem):
    schedule = make_schedule(problem)
    tiles = -(-problem.max_seq_len // schedule.config.tile_tokens)
    assert 1 <= schedule.num_splits <= max(1, tiles)
    # Splits are there to fill the GPU: with one split per row, or at most two rounds of CTAs.
    ctas = problem.batch * schedule.head_blocks * schedule.num_splits
    assert schedule.num_splits == 1 or ctas <= 2 * problem.num_sms * schedule.config.pipeline.ctas_per_sm


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_choice_is_the_cheapest_by_the_model(problem: AttentionProblem):
    chosen = make_schedule(problem)
    options = [(config, splits) for config in candidate_configs(problem) for splits in split_options(problem, config)]
    costs = dict(zip(options, expected_costs(problem, options), strict=True))
    assert costs[chosen.config, chosen.num_splits] == min(costs.values())


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "int8_token_head"])
@pytest.mark.parametrize(("heads", "batch"), [(8, 1), (8, 8), (8, 64), (1, 1), (1, 32), (1, 128)])
def test_a_table_for_128k_tokens_does_not_make_requests_of_8k_slow(kv_format, heads, batch):
    """By the model, within a tenth of what is best where 8k are known; and long requests within three tenths."""

    def problem(tokens: int) -> AttentionProblem:
        features = Features(paged=True)
        return AttentionProblem.uniform(
            batch, tokens, 4 * heads, heads, 128, kv_format, "bf16", page_tokens=16, features=features
        )

    chosen = make_schedule(problem(131072))
    for tokens, most in ((4096, 1.16), (8192, 1.1), (16384, 1.16), (131072, 1.3)):
        actual, best = problem(tokens), make_schedule(problem(tokens), None)
        if tokens == 131072:
            options = [(c, n) for c in candidate_configs(actual) for n in split_options(actual, c)]
            least = min(estimate_us(actual, *option) for option in options)
        else:
            least = estimate_us(actual, best.config, best.num_splits)
        splits = min(chosen.num_splits, -(-tokens // chosen.config.tile_tokens))
        assert estimate_us(actual, chosen.config, splits) <= most * least, tokens


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 64), st.integers(1, 500), st.integers(1, 500))
def test_fixed_splits_are_taken_as_given_whatever_the_batch(
    problem: AttentionProblem, num_splits: int, batch: int, other: int
):
    """The order of every sum must not depend on the rest of the batch, nor on what else the model might prefer."""
    schedules = [make_schedule(dataclasses.replace(problem, batch=b), num_splits) for b in (batch, other)]
    assert schedules[0] == schedules[1]
    assert schedules[0].num_splits == num_splits


@settings(max_examples=300, deadline=None)
@given(problems())
def test_rows_are_copied_in_bulk_only_where_16_bytes_divide_the_copies(problem: AttentionProblem):
    for config in candidate_configs(problem):
        for form, copy, tile in zip(config.formats, config.copies, tiles_of(config), strict=True):
            if not form.has_header:
                assert copy == "tma"
                continue
            assert isinstance(tile, RowTile)
            if not problem.aligned:
                assert copy == "word"
            if copy == "bulk":
                assert tile.copy_tokens * tile.token_words * 4 % 16 == 0
                # A CTA whose heads are a part of the cache's starts copies at any token and at its first head.
                assert config.mainloop.num_heads == problem.num_kv_heads or tile.token_words * 4 % 16 == 0
            assert config.runs.contiguous == (config.mainloop.num_heads == problem.num_kv_heads)


@pytest.mark.parametrize(("kv_format", "head_dim"), [("int4_g8", 80), ("int8_g4", 80), ("int8_g8", 96)])
def test_groups_that_no_mma_can_take_are_refused(kv_format, head_dim):
    width = head_dim // int(kv_format[-1])
    with pytest.raises(ValueError, match=f"kv_format: got {kv_format} for k_cache, .* groups of {width} columns"):
        candidate_configs(AttentionProblem.uniform(1, 100, 8, 1, head_dim, kv_format, "bf16"))


def test_one_kernel_serves_scales_per_tensor_and_per_head():
    """A scale for all heads is one per head that they share."""
    for codes in ("int8", "e4m3"):
        per_head, per_tensor = (
            candidate_configs(AttentionProblem.uniform(1, 4096, 8, 1, 128, f"{codes}_{granularity}", "bf16"))
            for granularity in ("head", "tensor")
        )
        assert per_head == per_tensor


@pytest.mark.parametrize(
    ("kv_format", "q_len", "features", "blocks"),
    [
        ("int4_g1", 1, {}, (1, 1)),
        ("int4_g1", 2, {}, (1, 2)),
        ("int4_g1", 3, {}, (1, 4)),
        ("int8_tensor", 4, {"window": True, "soft_cap": True}, (1, 4)),
        ("e4m3_token_head", 5, {}, (2, 4)),
        ("int8_channel", 16, {}, (2, 4)),
        # What takes registers of its own: groups, slopes and biases; what costs nothing to decode twice.
        ("int4_g2", 2, {}, (1, 2)),
        ("int4_g4", 4, {}, (2, 2)),
        ("int4_g8", 4, {"alibi": True}, (2, 2)),
        ("int8_tensor", 4, {"alibi": True}, (2, 2)),
        ("int4_g1", 4, {"bias": "bf16"}, (2, 2)),
        ("bf16", 4, {}, (2, 2)),
    ],
)
def test_queries_of_several_positions_share_what_a_warp_decodes(kv_format, q_len, features, blocks):
    """(warps that take different queries, blocks of 8 that each of them carries) for groups of 8 query heads."""
    wanted = Features(queries=q_len > 1, causal=q_len > 1, **features)
    problem = dataclasses.replace(issue_problem(kv_format, 32), q_len=q_len, features=wanted)
    for config in candidate_configs(problem):
        assert (config.mainloop.num_query_blocks, config.mainloop.blocks_per_warp) == blocks
        grouped = kv_format in ("int4_g2", "int4_g4", "int4_g8")
        assert config.lends_registers == (blocks[1] == 4 or grouped) and config.can_implement() is None


def test_warps_that_borrow_registers_are_eight_whatever_the_kv_heads():
    for num_kv_heads, heads, k_format in ((1, 1, "int4_g4"), (2, 2, "int4_g4"), (8, 4, "int4_g4"),
                                          (8, 4, "int8_token_head")):  # fmt: skip
        problem = AttentionProblem.uniform(32, 8192, 8 * num_kv_heads, num_kv_heads, 128, "int4_g4", "bf16", q_len=4)
        problem = dataclasses.replace(problem, k_format=k_format)
        configs = candidate_configs(problem)
        assert configs[0].mainloop.num_heads == heads
        assert all((config.num_warps, config.pipeline.producer_warps) == (8, 4) for config in configs)


@pytest.mark.parametrize(
    ("k_format", "v_format"),
    [
        *(("int8_token_head", name) for name in ("int4_g1", "int4_g4")),
        *(("e4m3_tensor", name) for name in ("int4_g1", "int4_g4")),
        ("int4_g4", "int8_token_head"),
        ("int8_g4", "int8_g4"),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_no_more_than_eight_warps_share_an_sm_where_one_needs_more_than_96_registers(k_format, v_format, num_kv_heads):
    """Codes of two kinds, or of several groups: 16 warps and their producers spilled in the loop."""
    problem = dataclasses.replace(_of_pages("int8_token_head", 32, 1), num_kv_heads=num_kv_heads)
    problem = dataclasses.replace(problem, num_q_heads=4 * num_kv_heads, k_format=k_format, v_format=v_format)
    assert all(config.num_warps * config.pipeline.ctas_per_sm <= 8 for config in candidate_configs(problem))


def _of_pages(kv_format: str, batch: int, q_len: int) -> AttentionProblem:
    features = Features(paged=True, causal=q_len > 1, queries=q_len > 1)
    return AttentionProblem.uniform(
        batch, 8192, 32, 8, 128, kv_format, "bf16", q_len=q_len, page_tokens=64, features=features
    )


@pytest.mark.parametrize(
    "kv_format, batch, q_len, heads",
    [
        *((name, batch, 1, 2) for name in ("int4_g1", "int4_g4", "int8_token_head") for batch in (1, 2)),
        *((name, batch, 1, 8) for name in ("int4_g1", "int4_g4", "int8_token_head") for batch in (4, 8, 32)),
        *(("int4_g1", batch, 2, 8) for batch in (4, 8, 32)),
        *(("int4_g1", batch, q_len, 2) for batch in (1, 2, 4, 8, 16, 32) for q_len in (4, 8)),
        *(("int4_g1", batch, 4, 8) for batch in (64, 128)),
        *(("int4_g4", batch, 4, 2) for batch in (1, 2, 4, 8)),
        *(("int4_g4", batch, 8, 2) for batch in (1, 4, 8, 32)),
    ],
)
def test_few_requests_and_several_queries_take_fewer_heads_a_cta(kv_format, batch, q_len, heads):
    """What was fastest on an H200, 32 query heads over 8k tokens: docs/design/history/decode_attention.md."""
    config = make_schedule(_of_pages(kv_format, batch, q_len)).config
    assert config.mainloop.num_heads == heads and set(config.copies) == {"bulk" if heads == 8 else "map"}


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, {8: "bulk", 4: "map", 2: "map", 1: "bulk"}),
        ({"heads_touch": False}, {1: "bulk"}),
        ({"aligned": False}, {1: "word"}),
        ({"tokens_touch": False}, {8: "bulk", 4: "map", 2: "map", 1: "bulk"}),
        ({"num_q_heads": 20, "num_kv_heads": 5}, {5: "bulk", 1: "bulk"}),
        ({"k_format": "int4_g1"}, {8: "bulk", 4: "map", 2: "map"}),
        ({"head_dim": 256, "v_head_dim": 256}, {8: "bulk", 4: "map", 2: "map", 1: "bulk"}),
    ],
)
def test_maps_bring_some_of_a_token_s_heads_where_they_touch(changes, copies):
    problem = dataclasses.replace(_of_pages("int4_g4", 1, 4), **changes)
    found = candidate_configs(problem)
    assert {config.mainloop.num_heads: config.copies[0] for config in found} == copies
    for config in found:
        assert config.can_implement() is None and config.copies in {(copy, copy) for copy in copies.values()}
        assert "map" not in config.copies or config.lends_registers


def test_fewer_heads_are_considered_where_a_token_s_rows_can_be_copied():
    def counts(kv_format: str, q_len: int = 4, **options: Any) -> list[int]:
        problem = dataclasses.replace(_of_pages(kv_format, 1, q_len), **options)
        return list(dict.fromkeys(config.mainloop.num_heads for config in candidate_configs(problem)))

    assert counts("int4_g1") == [8, 4, 2] and counts("int4_g4") == [8, 4, 2, 1], "rows of 68 and of 80 bytes"
    assert counts("int4_g1", 1) == counts("int8_token_head", 1) == [8, 4, 2], "one block of queries of few requests"
    assert counts("int4_g1", 2, batch=3) == counts("int8_token_head", 1, after_append=True) == [8]
    assert counts("int8_token_head") == [8]
    head_major = dataclasses.replace(_of_pages("int4_g1", 1, 4).features, head_major=True)
    assert counts("int4_g1", features=head_major) == [1]


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize(
    ("changes", "copy"),
    [
        ({}, "map"),
        ({"num_kv_heads": 1}, "bulk"),  # its tokens touch
        ({"num_kv_heads": 2}, "word"),  # 264 bytes a token
        ({"aligned": False}, "word"),
        ({"heads_touch": False}, "word"),
    ],
)
def test_maps_bring_the_rows_of_a_head_with_pages_of_its_own(changes, copy, q_len):
    problem = _of_pages("int8_token_head", 32, q_len)
    by_head = dataclasses.replace(problem.features, by_head=True)
    for config in candidate_configs(dataclasses.replace(problem, features=by_head, **changes)):
        assert (config.mainloop.num_heads, config.copies, config.can_implement()) == (1, (copy, copy), None)


def test_fixed_splits_do_not_ask_how_many_requests_there_are():
    """Which heads a CTA takes included: a request's bits must not depend on its batch."""
    for kv_format in ("int4_g1", "int4_g4"):
        assert len({make_schedule(_of_pages(kv_format, batch, 4), 3).config for batch in (1, 4, 32)}) == 1


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("max_seq_len", [0, 1])
def test_an_empty_or_tiny_cache_gets_one_split(kv_format, max_seq_len):
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    schedule = make_schedule(AttentionProblem.uniform(1, max_seq_len, 8, 1, 128, kv_format, q_dtype))
    assert schedule.num_splits == 1


# -- rows of different lengths ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.just(1), st.integers(1, 600)), min_size=1, max_size=80),
    st.sampled_from([1, 2, 4, 9]),
    st.integers(0, 528),
)
def test_units_take_every_tile_once_and_their_results_have_places(tiles: list[int], parts: int, ranges: int):
    ctas = max(len(tiles), -(-ranges // parts)) * parts
    places = max(len(tiles) * parts, len(tiles) + ranges)  # `plan.workspace_words`
    taken: dict[int, list[int]] = {row: [] for row in range(len(tiles))}
    shared: dict[int, dict[int, int]] = {}
    for units in units_of_ctas(tiles, parts, ctas, ranges):
        for unit in units:
            taken[unit.row] += unit.tiles
            shared.setdefault(unit.row, {})[unit.part] = unit.place
            assert 0 <= unit.place < places
    assert all(sorted(taken[row]) == list(range(count)) for row, count in enumerate(tiles))
    numbers = [place for of_row in shared.values() if len(of_row) > 1 for place in of_row.values()]
    assert len(set(numbers)) == len(numbers)
    for of_row in shared.values():  # parts' places follow each other
        assert sorted(of_row) == list(range(len(of_row)))
        assert all(place - of_row[0] == part for part, place in of_row.items())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=2, max_size=80), st.integers(1, 264))
def test_nobody_waits_for_a_cta_that_has_other_rows_to_do_before(tiles: list[int], ranges: int):
    """All parts of a row but the first are their CTA's last units, and all but the last their CTA's first: so the last
    ones, which combine, wait for what is stored early or at the end, and have nothing to do afterwards."""
    for units in units_of_ctas(tiles, 1, max(len(tiles), ranges), ranges):
        assert all(unit.num_parts == 1 for unit in units[1:-1])
        if len(units) > 1:
            assert units[0].part == 0 and units[-1].part == units[-1].num_parts - 1


def test_rows_of_one_length_are_cut_as_the_grid_is():
    units = units_of_ctas([8, 7, 8], 4, 20, 20)
    assert [(unit.row, unit.part, unit.num_parts) for (unit,) in units[:12]] == [
        (row, part, 4) for row in range(3) for part in range(4)
    ]
    assert not any(units[12:])


def test_one_long_row_among_short_ones_is_spread_over_all_ctas():
    """1023 requests of 4 tiles and one of 512: 4604 tiles are 132 ranges of at most 35."""
    loads = [sum(len(unit.tiles) for unit in units) for units in units_of_ctas([4] * 1023 + [512], 1, 1024, 132)]
    assert max(loads) == 35 and sum(loads) == 4604


@pytest.mark.parametrize("batch", [2, 34, 65, 66, 128, 600])
def test_where_lengths_differ_as_many_ctas_share_the_tiles_as_the_sms_hold(batch):
    problem = AttentionProblem.uniform(batch, 8192, 8, 1, 128, "int4_g4", "bf16", features=Features(paged=True))
    schedule = make_schedule(dataclasses.replace(problem, page_tokens=64, after_append=True, appends=True))
    assert schedule.ranges == problem.num_sms * schedule.config.pipeline.ctas_per_sm
    ctas = (batch + schedule.more_rows) * schedule.num_splits
    assert ctas >= schedule.ranges and (schedule.more_rows == 0 or ctas - schedule.num_splits < schedule.ranges)


@pytest.mark.parametrize("places", [16, 78, 132, 264])
def test_ranges_leave_at_most_a_quarter_of_the_gpu_idle_in_as_few_waves_as_can_be(places):
    for head_blocks in (1, 3, 8, 40, 71, 96, 128):
        ctas = ranges_of(places, head_blocks) * head_blocks
        waves = -(-ctas // places)
        assert ctas >= 0.75 * waves * places or waves >= 4 or head_blocks > places
        assert waves == 1 or places // head_blocks * head_blocks < 0.75 * places


@pytest.mark.parametrize("num_sms", [16, 78, 114, 132])
@pytest.mark.parametrize("num_kv_heads, q_len", [(1, 1), (8, 1), (8, 4), (32, 2)])
def test_combiners_of_all_heads_fit_half_of_the_gpu_where_lengths_may_differ(num_sms, num_kv_heads, q_len):
    problem = dataclasses.replace(_of_pages("int4_g4", 8, q_len), num_kv_heads=num_kv_heads, num_q_heads=64)
    problem = dataclasses.replace(problem, num_sms=num_sms)
    schedule = make_schedule(problem)
    places = num_sms * schedule.config.pipeline.ctas_per_sm
    assert schedule.ranges and 1 <= most_combiners(problem, schedule) <= max(1, places // 2 // schedule.head_blocks)


# -- measured choices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4"])
@pytest.mark.parametrize(("batch", "num_splits"), [(1, 32), (8, 16), (32, 4), (64, 2), (128, 1), (256, 1), (512, 1)])
def test_int4_splits_are_the_measured_best(kv_format, batch, num_splits):
    assert make_schedule(issue_problem(kv_format, batch)).num_splits == num_splits


@pytest.mark.parametrize("batch, seq_len", [(2048, 1024), (4096, 512), (1024, 512), (512, 1024), (512, 2048)])
def test_many_short_int4_rows_get_four_ctas_with_small_tiles(batch, seq_len):
    """Measured: 4 to 16 % faster than two CTAs of 8 warps."""
    schedule = make_schedule(AttentionProblem.uniform(batch, seq_len, 8, 1, 128, "int4_g1", "bf16"))
    config = schedule.config
    assert (
        config.pipeline.ctas_per_sm,
        config.mainloop.num_slices,
        config.mainloop.blocks_per_slice,
        schedule.num_splits,
    ) == (4, 4, 1, 1)


@pytest.mark.parametrize("batch", [1, 32, 64, 128, 256, 512])
def test_small_tiles_are_not_for_long_rows(batch):
    """Measured at 128 to 512 requests of 8192 tokens: 2 to 40 % slower."""
    config = make_schedule(AttentionProblem.uniform(batch, 8192, 8, 1, 128, "int4_g1", "bf16")).config
    assert config.pipeline.ctas_per_sm < 4


@pytest.mark.parametrize("kv_format", FORMATS)
def test_more_requests_never_get_more_splits(kv_format):
    splits = [make_schedule(issue_problem(kv_format, batch)).num_splits for batch in (1, 4, 16, 64, 128, 256, 512)]
    assert splits == sorted(splits, reverse=True) and splits[-1] == 1


@pytest.mark.parametrize("kv_format", FORMATS)
def test_the_model_never_expects_to_beat_the_memory(kv_format):
    for batch in (1, 32, 128, 512):
        problem = issue_problem(kv_format, batch)
        schedule = make_schedule(problem)
        expected = estimate_us(problem, schedule.config, schedule.num_splits)
        assert (
            expected >= batch * problem.max_seq_len * problem.token_bytes / 4.8e6
        )  # 4.8 TB/s is what an H200's HBM is sold as


@functools.cache
def shipped() -> frozenset[DecodeConfig]:
    return frozenset(spec.config for spec in shipped_specs() if isinstance(spec.config, DecodeConfig))


LAYOUTS = [(name, d) for name in FORMATS for d in (64, 128, 256)] + [(name, 128) for name in BYTE_FORMATS]


@each("kv_format, head_dim", LAYOUTS)
@each("num_kv_heads", [1, 8, 32])
def test_common_head_layouts_use_what_ships(kv_format, head_dim, num_kv_heads):
    """Bundles serve 8 query heads a KV head on 1, 8 or 32 KV heads at any batch and length without the compiler."""
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    for batch in (1, 7, 32, 64, 512):
        for max_seq_len in (64, 1024, 8192, 131072):
            problem = AttentionProblem.uniform(
                batch, max_seq_len, 8 * num_kv_heads, num_kv_heads, head_dim, kv_format, q_dtype
            )
            assert make_schedule(problem).config in shipped()


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_paged_int4_rows_go_to_fewer_warps_where_two_ctas_share_an_sm(page_tokens):
    """As measured; contiguous caches, several queries and several KV heads of a CTA keep their eight warps."""
    paged = Features(paged=True)

    def of(num_kv_heads=1, q_len=1, **others):
        problem = AttentionProblem.uniform(
            512, 8192, 8 * num_kv_heads, num_kv_heads, 128, "int4_g1", "bf16", q_len=q_len, **others
        )
        return [
            (c.num_warps, c.mainloop.blocks_per_slice)
            for c in candidate_configs(problem)
            if c.pipeline.ctas_per_sm == 2
        ]

    assert of(page_tokens=page_tokens, features=paged) == [(4, 2)]
    assert of() == [(8, 1)]
    assert of(num_kv_heads=8, page_tokens=page_tokens, features=paged) == [(8, 1)]
