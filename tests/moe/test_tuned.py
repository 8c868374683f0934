"""What tuned tables change of grouped products: which layout is taken, never what may be taken."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import tuned as of_linear
from cute_kernels.gemm.experts import compile as moe_compile
from cute_kernels.gemm.experts import plan, tuned
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.experts.schedule import GroupedProblem, GroupedSchedule
from cute_kernels.gemm.experts.tuned import (
    candidates,
    chosen,
    find,
    key_of,
    modelled,
    problem_of,
    usual_entries,
    worth_measuring,
)
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.config import LimbRowsConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import MmaSync
from cute_kernels.runtime import tuned as tables
from cute_kernels.runtime.tuned import own_path
from tests.launchers import recording
from tests.tuned_tables import GPU, choice, no_tables, table


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


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with no_tables(monkeypatch, tmp_path):
        yield


@pytest.mark.parametrize("problem", PROBLEMS, ids=key_of)
def test_every_candidate_is_found_by_its_name(problem: GroupedProblem):
    found = list(candidates(problem))
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert find(problem, choice(candidate)) == candidate.schedule
        assert candidate.schedule.config.can_implement() is None
    assert worth_measuring(problem)[0].schedule == modelled(problem)


@pytest.mark.parametrize("problem", PROBLEMS, ids=key_of)
def test_batch_invariant_products_add_up_in_one_way_whatever_a_table_says(problem: GroupedProblem):
    wanted = replace(problem, batch_invariant=True)
    table({key_of(problem): choice(worth_measuring(problem)[-1])}).write(own_path(GPU))
    for places in (1, 3, 100, 20000):
        found = chosen(replace(wanted, places=places), GPU)
        assert isinstance(found, GroupedTiles) and not found.config.reduction.splits_k
        assert not (found.config.limbs or isinstance(found.config.mainloop, MmaSync))


@pytest.mark.parametrize("problem", PROBLEMS, ids=key_of)
def test_keys_name_problems(problem: GroupedProblem):
    assert problem_of(key_of(problem)) == problem
    assert problem_of("x" + key_of(problem)) is None and of_linear.problem_of(key_of(problem)) is None
    others = [
        replace(problem, **{name: getattr(problem, name) + 64}) for name in ("places", "num_experts", "n", "num_sms")
    ]
    assert len({key_of(one) for one in (problem, *others)}) == 5


def test_what_is_measured_are_a_few_of_each_kernel():
    for problem in PROBLEMS:
        found = worth_measuring(problem)
        assert max(Counter(one.kernel for one in found[1:]).values()) <= of_linear.MOST
        assert max(Counter(one.schedule.config for one in found).values()) <= of_linear.MOST_CUTS
    kernels = [{one.kernel for one in worth_measuring(problem)} for problem in PROBLEMS]
    assert kernels[1] == {of_linear.FEW, of_linear.MANY}
    assert kernels[3] == {of_linear.MANY}, "64 rows an expert: weights would be read several times"


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


def test_the_kernels_that_shipped_tables_choose_ship():
    assert tuned.shipped_configs() == [] == of_linear.shipped_configs()
    wanted = [worth_measuring(problem)[-1] for problem in PROBLEMS[1:3]]
    entries = {key_of(problem): choice(one) for problem, one in zip(PROBLEMS[1:3], wanted, strict=True)}
    gone = {key_of(PROBLEMS[0]): choice(wanted[0], config="gone")}
    table(entries | gone).write(tables.SHIPPED / tables.file_name(GPU))
    assert set(tuned.shipped_configs()) == {one.schedule.config for one in wanted}
    assert of_linear.shipped_configs() == []
    shipped = moe_compile.shipped_specs()
    assert all(moe_compile.spec_of(one.schedule.config) in shipped for one in wanted)


@pytest.mark.parametrize("changes", [{"config": "gone"}, {"cut": 1000}, {"kernel": "other"}])
def test_an_entry_that_names_nothing_is_no_entry(changes):
    problem = PROBLEMS[1]
    table({key_of(problem): choice(worth_measuring(problem)[-1], **changes)}).write(own_path(GPU))
    assert tuned.tuned(problem, GPU) is None and tuned.chosen(problem, GPU) == modelled(problem)


@pytest.mark.parametrize("kind", [GroupedSchedule, RangeLayout, GroupedTiles])
def test_plans_are_of_what_a_table_chooses(kind):
    """Each kernel for a product that the model would give to another one, on the table's GPU only."""
    problem = {
        GroupedSchedule: grouped(64, 8, 4096, 14336),
        RangeLayout: grouped(64, 8, 1024, 1024),
        GroupedTiles: grouped(8, 8, 1024, 1024),
    }[kind]
    assert not isinstance(modelled(problem), kind)
    wanted = next(one for one in worth_measuring(problem) if isinstance(one.schedule, kind))
    table({key_of(problem): choice(wanted)}).write(own_path(GPU))

    def made(places: int, gpu: str) -> tuple[Any, Any]:
        """The plan and the configuration of its kernel."""
        p = problem
        form = ExpertsForm(p.num_experts, p.n, p.k, p.k_pad, integers(4), torch.bfloat16, 0)
        with recording(name=lambda index: gpu) as recorded:
            found = plan.plan_of(places, form)
        configs: list[Any] = [spec.config for spec, *_ in recorded.loaded]  # what makes limbs may be loaded first
        return found, next(config for config in configs if not isinstance(config, LimbRowsConfig))

    found, config = made(problem.places, GPU)
    assert config == wanted.schedule.config and found.gathers == (kind is not GroupedTiles)
    for places, gpu in ((problem.places, "NVIDIA H100"), (problem.places + 1, GPU)):
        assert made(places, gpu)[1] == modelled(replace(problem, places=places)).config


def test_products_in_limbs_ship_with_the_kernel_that_makes_them():
    shipped = moe_compile.shipped_specs()
    configs = [spec.config for spec in shipped if isinstance(spec.config, WgmmaConfig) and spec.config.limbs]
    assert configs
    names = {spec.symbol for spec in shipped}
    for config in configs:
        made, product = (spec.symbol for spec in moe_compile.specs_of(config))
        assert made == f"linear_limbs_{config.dtype}" and {made, product} <= names
