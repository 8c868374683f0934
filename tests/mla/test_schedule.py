"""How rows are cut into parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.mla.config import (
    BLOCK_HEADS,
    COOPERATIVE_PARTS,
    SHIPPED,
    MlaConfig,
    fits_crossover,
    fits_tma_tiles,
    served_config,
)
from cute_kernels.mla.few_heads.config import FewHeadsConfig, shipped_few_heads
from cute_kernels.mla.policies import CooperativeTiles, Copies, Crossover, Decode, SplitTiles, TmaTiles, WholeTiles
from cute_kernels.mla.schedule import (
    COOPERATIVE,
    COPIES,
    CROSSOVER,
    FEW_HEADS,
    MAX_PARTS,
    MAX_STREAM_K_REQUESTS,
    STREAM_K,
    WIDE,
    Workload,
    choose,
    choose_combine,
    choose_parts,
    cooperative_heads,
    cost_us,
    count_ctas,
    possible_parts,
)

SHAPES = st.builds(Workload, st.integers(1, 700), st.integers(1, 256), st.integers(1, 1 << 18))


@given(SHAPES, st.sampled_from([rate for rate in (WIDE, CROSSOVER, COPIES, *FEW_HEADS) if rate.cluster == 1]))
def test_no_part_is_empty_and_none_is_cheaper(shape, rate):
    parts = choose_parts(shape, rate)
    assert cost_us(shape, parts, rate) <= cost_us(shape, 1, rate)
    if parts == STREAM_K:
        assert shape.has_stream_k and rate.heads == BLOCK_HEADS
        return
    size = -(-shape.num_blocks // parts)
    assert 1 <= parts <= min(MAX_PARTS, shape.num_blocks)
    assert (parts - 1) * size < shape.num_blocks


def test_few_heads_have_a_kernel_of_their_own():
    for heads, wanted in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)):
        for tokens in ("sparse", "paged"):
            config, parts = choose(tokens, "mla_fp8", 576, Workload(128, heads, 2048))
            assert isinstance(config, FewHeadsConfig) and config.can_implement() is None
            assert (config.tokens, config.heads, parts) == (tokens, wanted, 1)
    wide = choose("sparse", "mla_fp8", 576, Workload(256, 128, 2048))
    assert wide == (served_config("sparse", "mla_fp8", crossover=True, eager=True), STREAM_K)
    for form, head_dim in (("mla_bf16", 576), ("mla_bf16", 512), ("mla_model1", 512)):
        assert choose("paged", form, head_dim, Workload(128, 16, 8192)) == (served_config("paged", form, head_dim), 1)


def test_pairs_of_blocks_of_heads_decode_half_of_the_tokens_each():
    for form, head_dim in (("mla_fp8", 576), ("mla_model1", 512)):
        for heads, pairs in ((64, False), (65, True), (128, True), (192, False), (256, True)):
            config, _ = choose("sparse", form, head_dim, Workload(256, heads, 2048))
            assert isinstance(config, MlaConfig) and config.crossover == pairs and config.can_implement() is None
            config, _ = choose("paged", form, head_dim, Workload(256, heads, 2048))
            assert isinstance(config, MlaConfig) and config.crossover == (pairs and form == "mla_fp8")
            assert config.can_implement() is None
    assert not fits_crossover("sparse", "mla_bf16", 128)


def test_whole_contexts_of_16_bit_tokens_come_boxed_where_pages_are_whole_blocks():
    for page_size, tma_tiles in ((1, False), (32, False), (64, True), (96, False), (192, True)):
        assert fits_tma_tiles("paged", "mla_bf16", page_size) == tma_tiles
        assert not fits_tma_tiles("sparse", "mla_bf16", page_size) and not fits_tma_tiles("paged", "mla_fp8", page_size)
    for form in ("mla_bf16", "mla_fp16"):
        for heads, pairs in ((1, False), (64, False), (65, True), (192, False), (256, True)):
            config, parts = choose("paged", form, 576, Workload(128, heads, 8192, tma_tiles=True))
            assert config == served_config("paged", form, None, pairs, False, True, heads <= BLOCK_HEADS)
            assert parts == (STREAM_K if heads > BLOCK_HEADS else 1)
            assert isinstance(config, MlaConfig) and config.can_implement() is None
            assert (config.cluster, config.tiles.load.prefetch) == ((1, 0), (2, 1))[pairs]
            assert ("paged", form, None, pairs, False, True) in SHIPPED or config.tiles.eager
            unboxed, same = choose("paged", form, 576, Workload(128, heads, 8192))
            assert isinstance(unboxed, MlaConfig) and not unboxed.tma_tiles and same == parts
    config, parts = choose("paged", "mla_bf16", 576, Workload(1, 128, 32768, tma_tiles=True))
    assert config == served_config("paged", "mla_bf16", tma_tiles=True) and parts > 32, "shares are too short for pairs"


def test_few_rows_of_few_heads_are_clusters_where_they_have_few_tokens():
    for rows, heads in ((1, 8), (2, 8), (2, 16), (4, 16)):
        config, parts = choose("sparse", "mla_fp8", 576, Workload(rows, heads, 1024))
        assert isinstance(config, FewHeadsConfig) and config.cluster == parts == 8
        assert config in shipped_few_heads()
    # Many parts of a block, clusters that do not all find room, and shares of no block.
    for shape in (Workload(2, 16, 2048), Workload(16, 16, 2048), Workload(2, 16, 300)):
        config, _ = choose("sparse", "mla_fp8", 576, shape)
        assert isinstance(config, FewHeadsConfig) and config.cluster == 1


def test_few_rows_of_many_heads_are_added_up_in_one_launch():
    """All CTAs are there at once: with crossover, where rows in at least 4 parts find room. Other formats are not."""
    cooperative = served_config("sparse", "mla_fp8", crossover=True, cooperative=True)
    for rows, parts in ((2, 16), (4, 16), (6, 11), (8, 8), (16, 4)):
        assert choose("sparse", "mla_fp8", 576, Workload(rows, 128, 2048)) == (cooperative, parts)
    for form, head_dim, shape in (
        ("mla_fp8", 576, Workload(17, 128, 2048)),
        ("mla_fp8", 576, Workload(4, 64, 2048)),
        ("mla_model1", 512, Workload(4, 128, 2048)),
    ):
        config, _ = choose("sparse", form, head_dim, shape)
        assert not (isinstance(config, MlaConfig) and config.cooperative)


@given(SHAPES)
def test_all_that_add_up_together_are_there_at_once(shape):
    for parts in possible_parts(shape, COOPERATIVE):
        assert count_ctas(shape, parts) <= shape.num_sms
        assert parts in COOPERATIVE_PARTS and cooperative_heads(parts) * parts >= BLOCK_HEADS


def test_the_right_half_lags_where_shares_are_long():
    """A longer program, for many blocks; a tile that is given back early, for chosen tokens and for memory's rate."""
    for rows, topk, delays_pv in (
        (4, 2048, False),
        (64, 512, False),
        (64, 1024, True),
        (64, 2048, True),
        (256, 2048, True),
        (296, 32768, True),
    ):
        config, _ = choose("sparse", "mla_fp8", 576, Workload(rows, 128, topk))
        assert (
            isinstance(config, MlaConfig) and config.crossover and config.delays_pv == config.tiles.eager == delays_pv
        )
    for rows, delays_pv in ((1, False), (128, True)):
        config, _ = choose("paged", "mla_fp8", 576, Workload(rows, 256, 8192))
        assert isinstance(config, MlaConfig) and config.crossover == config.tiles.eager == delays_pv
    for rows, heads, eager in ((128, 64, True), (128, 16, True), (1, 64, False), (1, 128, False), (128, 128, False)):
        config, _ = choose("paged", "mla_bf16", 576, Workload(rows, heads, 32768, tma_tiles=True))
        assert isinstance(config, MlaConfig) and config.delays_pv and config.tiles.eager == eager


def test_16_bit_tokens_of_several_blocks_of_heads_go_in_steps():
    for tokens in ("sparse", "paged"):
        for heads, order in ((16, "plain"), (64, "plain"), (65, "stepped"), (128, "stepped")):
            config, _ = choose(tokens, "mla_bf16", 576, Workload(4096, heads, 2048))
            assert isinstance(config, MlaConfig) and config.tiles.mainloop == order and config.can_implement() is None


@given(SHAPES, st.sampled_from(("sparse", "paged")))
def test_what_is_chosen_is_shipped(shape, tokens):
    config, parts = choose(tokens, "mla_fp8", 576, shape)
    served = [served_config(*which) for which in SHIPPED if which[:2] == (tokens, "mla_fp8")]
    assert config in (*served, *shipped_few_heads())
    assert config.can_implement() is None and STREAM_K <= parts <= MAX_PARTS
    if isinstance(config, FewHeadsConfig) and config.cluster > 1:
        assert parts == config.cluster


def test_the_model_is_near_what_was_measured():
    """Microseconds of docs/design/mla.md and docs/design/mla_few_heads.md: all within a tenth."""
    h8, h16, h32, h8c8 = FEW_HEADS
    for rate, rows, heads, num_tokens, parts, us in (
        (WIDE, 128, 64, 2048, 1, 98.3), (WIDE, 4, 64, 2048, 16, 21.5), (WIDE, 4, 64, 2048, 32, 21.2),
        (COPIES, 1, 128, 32768, 64, 30.6), (COPIES, 1, 128, 32768, 52, 31.8), (COPIES, 4, 128, 8192, 16, 29.9),
        (COPIES, 4, 128, 8192, 8, 39.6), (COPIES, 1, 16, 8192, 64, 16.7), (COPIES, 1, 16, 8192, 32, 20.0),
        (CROSSOVER, 4, 128, 2048, 16, 21.5), (CROSSOVER, 4, 128, 2048, 11, 21.8), (CROSSOVER, 4, 128, 2048, 8, 24.9),
        (CROSSOVER, 1, 128, 2048, 32, 18.0), (CROSSOVER, 1, 128, 2048, 16, 19.6), (CROSSOVER, 3, 128, 2048, 16, 20.5),
        (CROSSOVER, 8, 128, 2048, 8, 26.5), (CROSSOVER, 8, 128, 2048, 4, 33.3), (CROSSOVER, 256, 128, 2048, 1, 302.8),
        (CROSSOVER, 296, 128, 32768, 2, 5190.7), (CROSSOVER, 66, 128, 4096, 1, 154.5),
        (COOPERATIVE, 4, 128, 2048, 16, 18.5), (COOPERATIVE, 4, 128, 2048, 11, 20.3),
        (COOPERATIVE, 4, 128, 2048, 8, 21.9), (COOPERATIVE, 1, 128, 2048, 32, 16.1),
        (COOPERATIVE, 1, 128, 2048, 16, 16.1), (COOPERATIVE, 2, 128, 2048, 32, 17.4),
        (COOPERATIVE, 8, 128, 2048, 8, 22.7), (COOPERATIVE, 16, 128, 2048, 4, 32.4),
        (COOPERATIVE, 4, 128, 32768, 16, 83.6),
        (h16, 128, 16, 2048, 1, 62.0), (h8, 128, 8, 2048, 1, 57.4), (h32, 128, 32, 2048, 1, 98.1),
        (h32, 128, 64, 2048, 1, 189.3), (h16, 128, 16, 8192, 1, 217.6), (h16, 33, 16, 2048, 4, 27.1),
        (h16, 4, 128, 2048, 4, 25.9), (h32, 4, 128, 2048, 8, 26.3), (h16, 1, 128, 2048, 16, 16.4),
        (h16, 2, 16, 2048, 16, 14.5), (h16, 2, 16, 2048, 32, 12.6), (h8, 2, 16, 2048, 32, 12.6),
        (h16, 8, 16, 2048, 16, 16.4), (h16, 8, 16, 2048, 11, 17.7), (h8, 8, 16, 2048, 8, 17.6),
        (h8c8, 2, 16, 2048, 8, 13.5),
    ):  # fmt: skip
        assert abs(cost_us(Workload(rows, heads, num_tokens), parts, rate) - us) < us / 10


def test_few_rows_are_cut_and_a_full_gpu_is_not():
    assert choose_parts(Workload(4, 128, 2048)) in range(8, 17)  # of 32 blocks, on 8 CTAs a part
    assert choose_parts(Workload(128, 64, 2048)) == 1
    assert choose_parts(Workload(1, 16, 64)) == 1
    assert choose_parts(Workload(1, 128, 32768)) in range(24, 67)


@given(SHAPES)
def test_few_rows_are_added_up_by_all_sms(shape):
    slots, row_bits = choose_combine(shape)
    rows, ctas = shape.num_rows * shape.num_heads, -(-shape.num_rows * shape.num_heads // (1 << row_bits))
    if slots == 1:
        assert row_bits == 0 and -(-rows // 8) > shape.num_sms
    else:
        assert 1 << row_bits <= slots and ctas <= shape.num_sms
        assert row_bits == 0 or -(-rows // (1 << (row_bits - 1))) > shape.num_sms


def test_the_line_has_a_team_of_ctas_for_all_heads_of_a_row():
    for heads, num_sms, teams in ((128, 132, 66), (128, 131, 65), (256, 132, 33), (40, 132, 132), (129, 132, 44)):
        shape = Workload(256, heads, 2048, num_sms)
        assert shape.teams == teams and count_ctas(shape, STREAM_K) == teams * -(-heads // BLOCK_HEADS)
    assert count_ctas(Workload(4, 100, 2048), 3) == 24
    for shape in (
        Workload(65, 128, 2048),
        Workload(200, 128 * 200, 2048),
        Workload(MAX_STREAM_K_REQUESTS + 1, 128, 64),
    ):
        assert not shape.has_stream_k
        with pytest.raises(ValueError, match="num_parts"):
            count_ctas(shape, STREAM_K)


def test_rows_for_all_teams_are_a_line():
    """Those of the benchmark: no turn is left half empty, and no partial results are added up by a second launch."""
    for tokens, form, shape in (
        ("sparse", "mla_fp8", Workload(256, 128, 2048)),
        ("sparse", "mla_fp8", Workload(296, 128, 32768)),
        ("paged", "mla_bf16", Workload(128, 256, 8192)),
        ("sparse", "mla_fp8", Workload(100, 128, 2048)),
    ):
        assert choose(tokens, form, 576, shape)[1] == STREAM_K
    for shape in (Workload(128, 64, 8192), Workload(128, 16, 8192)):
        assert choose("paged", "mla_bf16", 576, shape)[1] == 1


def test_configurations_fit_and_say_why_not():
    assert MlaConfig().can_implement() is None
    assert MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles(pair=True, prefetch=1))).can_implement() is None
    for config, word in (
        (MlaConfig(form="mla_bf16"), "load"),
        (MlaConfig(form="mla_bf16", tiles=WholeTiles(Crossover())), "load"),
        (MlaConfig(tiles=WholeTiles(Copies())), "load"),
        (MlaConfig("paged", tiles=SplitTiles(TmaTiles())), "load"),
        (MlaConfig("sparse", "mla_bf16", tiles=SplitTiles(TmaTiles())), "side by side"),
        (MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles(prefetch=2))), "prefetch"),
        (MlaConfig(tiles=WholeTiles(Decode(prefetch=17))), "prefetch"),
        (MlaConfig(tiles=WholeTiles(Crossover(prefetch=1))), "prefetch"),
        (MlaConfig(tiles=WholeTiles(Decode(prefetch=16))), "shared memory"),
        (MlaConfig(tiles=WholeTiles(Decode(chunk=0))), "chunk"),
        (MlaConfig(tiles=WholeTiles(Decode(fence="none"))), "fence"),
        (MlaConfig(tiles=WholeTiles(Decode(warps=5))), "warps"),
        (MlaConfig(tiles=WholeTiles(Decode(warps=8), "stepped")), "mainloop"),
        (MlaConfig(tiles=WholeTiles(Decode(), "delayed_pv")), "mainloop"),
        (MlaConfig(form="int4"), "form"),
        (MlaConfig(tokens="all"), "tokens"),
        (MlaConfig(tiles=WholeTiles(Decode("fp16"))), "scales"),
        (MlaConfig(tiles=WholeTiles(Decode("ue8m0"))), "scales"),
        (MlaConfig(form="mla_model1", tiles=WholeTiles(Decode("ue8m0"))), "head_dim"),
        (MlaConfig(form="mla_model1", head_dim=512), "scales"),
        (MlaConfig(form="mla_bf16", head_dim=448, tiles=WholeTiles(Copies())), "head_dim"),
        (MlaConfig("sparse", "mla_model1", 512, CooperativeTiles(Crossover("ue8m0"))), "cooperative"),
    ):
        reason = config.can_implement()
        assert reason is not None and word in reason


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_cover_every_block_once(run_on, parts):
    pytest.importorskip("cutlass")
    from cute_kernels.mla import work
    from simulator import PlainThread

    run_on(PlainThread())

    for num_blocks in range(30):
        shares = [range(*work.WorkTile.share(num_blocks, parts, part)) for part in range(parts)]
        assert [block for share in shares for block in share] == list(range(num_blocks))
