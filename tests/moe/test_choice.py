"""Which layout of grouped products is chosen, and what ships with it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts import compile as moe_compile
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.schedule import usual_entries
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import MmaSync
from tests.moe.candidates import candidates


def grouped(places: int, experts: int, n: int, k: int, bits=4, dtype="bf16", group_size=128, zero=False):
    k_pad = padded_shape((n, k), group_size or None)[1]
    return GroupedProblem(places, experts, n, k, k_pad, integers(bits, group_size, zero), dtype)


PROBLEMS = [
    grouped(2, 8, 28672, 4096),
    grouped(64, 8, 4096, 14336),
    grouped(1024, 128, 1536, 2048, 8, "fp16", 64, True),
    grouped(16384, 256, 7168, 2048),
    grouped(10, 3, 100, 520, group_size=0),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_what_is_chosen_is_a_candidate_that_can_be_implemented(problem: GroupedProblem):
    found = list(candidates(problem))
    assert len({layout.config.name for layout in found}) == len(found)
    assert all(layout.config.can_implement() is None for layout in found)
    assert chosen(problem) in found


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_batch_invariant_products_add_up_in_one_way(problem: GroupedProblem):
    wanted = replace(problem, batch_invariant=True)
    for places in (1, 3, 100, 20000):
        found = chosen(replace(wanted, places=places))
        assert isinstance(found, GroupedTiles) and not found.config.reduction.splits_k
        assert not (found.config.limbs or isinstance(found.config.mainloop, MmaSync))


@pytest.mark.parametrize("mean, capacity", [(0.25, 8), (3.0, 8), (20.0, 16)])
def test_usual_entries_are_those_of_random_rows(mean: float, capacity: int):
    """Of rows that fall to one of many experts at random."""
    generator = random.Random(0)
    experts, trials = 64, 60
    total = 0
    for _ in range(trials):
        counts = Counter(generator.randrange(experts) for _ in range(round(mean * experts)))
        total += sum(math.ceil(count / capacity) for count in counts.values())
    assert usual_entries(mean, capacity) == pytest.approx(total / trials / experts, rel=0.05)


def test_products_in_limbs_ship_with_the_kernel_that_makes_them():
    shipped = moe_compile.shipped_specs()
    configs = [spec.config for spec in shipped if isinstance(spec.config, WgmmaConfig) and spec.config.limbs]
    assert configs
    names = {spec.symbol for spec in shipped}
    for config in configs:
        made, product = (spec.symbol for spec in moe_compile.specs_of(config))
        assert made == f"linear_limbs_{config.dtype}" and {made, product} <= names
