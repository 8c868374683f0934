"""The bank model against a brute-force simulation, the hardware's stated rules, and published counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.banks import joins_phases, report, wavefronts
from layouts.patterns import ACCESSES


def words(fn):
    return [4 * fn(lane) for lane in range(32)]


@pytest.mark.parametrize(
    ("stride", "expected"),
    [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (17, 1), (20, 4), (32, 32), (33, 1)],
)
def test_strided_words(stride, expected):
    assert wavefronts(words(lambda lane: stride * lane)) == expected


@pytest.mark.parametrize(("width", "phases"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("kind", ["ld", "st", "st.async"])
def test_contiguous_access_takes_one_wavefront_per_128_bytes(width, phases, kind):
    found = report([width * lane for lane in range(32)], width, kind)
    assert found.wavefronts == phases == len(found.phases)
    assert found.conflicts == 0 and found.wavefronts == max(1, found.minimum)


def test_same_word_is_served_to_all_lanes_at_once():
    assert wavefronts([0] * 32, 4) == 1
    assert wavefronts([lane // 4 * 4 for lane in range(32)], 4) == 1
    assert wavefronts([lane % 4 for lane in range(32)], 1) == 1


def test_phases_are_half_and_quarter_warps():
    halves = report(words(lambda t: t % 16 * 2 + t // 16 * 32), 8)
    assert [phase.lanes for phase in halves.phases] == [tuple(range(16)), tuple(range(16, 32))]
    assert halves.wavefronts == 2, "the halves share banks but not a phase"
    quarters = report(words(lambda t: t % 8 * 4 + t // 8 * 32), 16)
    assert [phase.wavefronts for phase in quarters.phases] == [1, 1, 1, 1]


def test_loads_of_paired_lanes_join_phases_and_stores_do_not():
    pairs = words(lambda t: t // 2 * 2)
    assert joins_phases(pairs)
    assert wavefronts(pairs, 8, "ld") == 1
    assert wavefronts(pairs, 8, "st") == 2
    assert wavefronts(words(lambda t: (t // 4 * 2 + t % 2) * 4), 16, "ld") == 2
    assert not joins_phases(words(lambda t: t // 8 * 4 + t % 4))


def test_inactive_lanes_cost_nothing():
    only_one = [None] * 31 + [64]
    assert wavefronts(only_one, 16) == 1
    assert len(report(only_one, 16).phases) == 1
    assert wavefronts([None] * 32) == 0


def test_ldmatrix_counts_eight_rows_per_phase():
    assert wavefronts(lambda t: 128 * t, 16, "ldmatrix") == 32
    assert wavefronts(lambda t: 128 * t + 16 * (t % 8), 16, "ldmatrix") == 4
    assert wavefronts([128 * row for row in range(8)], 16, "ldmatrix") == 8
    assert wavefronts([144 * row for row in range(16)], 16, "ldmatrix") == 2
    assert wavefronts(lambda t: 0, 16, "ldmatrix") == 4, "phases of ldmatrix never join"


PUBLISHED_BANKS = {
    "gqa_p_load": 4,
    "gqa_p_load_swizzled": 16,
    "gqa_p_store_swizzled": 16,
    "gqa_k_store": 4,
    "gqa_k_store_padded": 32,
    "gqa_k_load": 16,
    "gqa_k_load_padded": 29,
    "gqa_v_store": 4,
}


@pytest.mark.parametrize(("name", "banks"), PUBLISHED_BANKS.items())
def test_published_banks_in_parallel(name, banks):
    assert ACCESSES[name].report().banks == (banks,)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("gqa_p_load", 8, 2), ("gqa_p_store", 4, 2), ("gqa_k_store", 8, 1), ("gqa_k_load", 2, 2), ("gqa_v_store", 8, 2)],
)
def test_wavefronts_before_and_after(name, before, after):
    fixed = name + ("_swizzled" if name.startswith("gqa_p") else "_padded")
    assert (ACCESSES[name].report().wavefronts, ACCESSES[fixed].report().wavefronts) == (before, after)


def test_int4_rows_read_without_conflicts_where_the_kernel_design_relies_on_it():
    for name in ("int4_g1_row_per_lane", "int4_g1_header", "int4_g4_quad"):
        assert ACCESSES[name].report().conflicts == 0, name
    assert ACCESSES["int4_g1_quad"].report().wavefronts == 2
    assert ACCESSES["int4_g4_vec4"].report().wavefronts == 4, "16 bytes every 80 bytes: each quarter-warp hits 32 banks"


def brute_force(addresses, width, lanes_per_phase):
    """Serve one word per bank and cycle until every lane has its bytes."""
    cycles = 0
    for start in range(0, 32, lanes_per_phase):
        wanted = set()
        for address in addresses[start : start + lanes_per_phase]:
            wanted |= {(address + byte) // 4 for byte in range(width)}
        while wanted:
            cycles += 1
            served = {}
            for word in wanted:
                served.setdefault(word % 32, word)
            wanted -= set(served.values())
    return cycles


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 16]), st.lists(st.integers(0, 511), min_size=32, max_size=32))
def test_stores_agree_with_brute_force(width, slots):
    addresses = [slot * width for slot in slots]
    assert wavefronts(addresses, width, "st") == brute_force(addresses, width, min(32, 128 // width))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([4, 8, 16]), st.lists(st.integers(0, 255), min_size=32, max_size=32), st.integers(1, 40))
def test_moving_all_addresses_by_whole_rows_of_banks_changes_nothing(width, slots, rows):
    addresses = [slot * width for slot in slots]
    assert wavefronts(addresses, width) == wavefronts([address + 128 * rows for address in addresses], width)


def test_numpy_addresses_are_taken():
    assert wavefronts((np.arange(32) * 4).tolist()) == wavefronts(lambda lane: int(np.int64(4) * lane)) == 1


def test_describe_names_lanes_and_banks():
    text = ACCESSES["gqa_k_load_padded"].report().describe()
    assert text == "ld 4 B: 2 wavefronts, 1 conflicts\n  lanes 0-31: 29 of 32 banks, 2 wavefronts"


def test_there_are_enough_named_accesses_to_validate_the_model_with():
    assert len(ACCESSES) >= 20
    assert {access.kind for access in ACCESSES.values()} >= {"ld", "st", "ldmatrix"}
    assert {access.width for access in ACCESSES.values()} >= {4, 8, 16}


@pytest.mark.parametrize(
    ("args", "words_"),
    [
        (([0] * 32, 4, "load"), "kind is 'load'"),
        (([0] * 32, 12), "width is 12"),
        (([0] * 33,), "33 lanes"),
        (([],), "0 lanes"),
        (([2] * 32, 4), "lane 0 has byte address 2"),
        (([-4] * 32, 4), "byte address -4"),
        (([0] * 9, 16, "ldmatrix"), "9 addresses"),
        (([0] * 8, 4, "ldmatrix"), "of 4 B"),
    ],
)
def test_bad_input_is_named(args, words_):
    with pytest.raises(ValueError, match=words_):
        report(*args)
