"""What tuned tables change: which schedule is taken, never what may be taken."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import deferred_choice, tuned
from cute_kernels.gemm.compile import shipped_specs, spec_of
from cute_kernels.gemm.experts import tuned as of_experts
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.tuned import candidates, chosen, chosen_by, find, key_of, modelled, problem_of, worth_measuring
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.deferred_config import GIVES
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.runtime import tuned as tables
from cute_kernels.runtime.tuned import Choice, TableError, TunedTable, own_path
from tests.tuned_tables import GPU, choice, no_tables, table

SHIPPED = sorted(tables.SHIPPED.glob("*.json"))
PROBLEMS = [
    LinearProblem(m, n, k, -(-k // 256) * 256, integers(bits, group_size), "bf16")
    for m, bits, group_size in ((1, 4, 128), (8, 4, 32), (16, 8, 256), (33, 4, 0), (1000, 4, 128))
    for n, k in ((8192, 8192), (100, 520))
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with no_tables(monkeypatch, tmp_path):
        yield


@pytest.mark.parametrize("problem", PROBLEMS, ids=key_of)
def test_every_candidate_is_found_by_its_name(problem: LinearProblem):
    found = list(candidates(problem))
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert find(problem, choice(candidate)) == candidate.schedule
    assert worth_measuring(problem)[0].schedule == modelled(problem)


@pytest.mark.parametrize("problem", PROBLEMS, ids=key_of)
def test_keys_name_problems(problem: LinearProblem):
    k_pad = padded_shape((problem.n, problem.k), problem.format.group_size)[1]
    assert problem_of(key_of(problem)) == replace(problem, k_pad=k_pad)
    assert problem_of("x" + key_of(problem)) is None


def test_what_is_measured_are_a_few_cuts_of_the_best_configurations():
    for problem in PROBLEMS:
        found = worth_measuring(problem)
        by_kernel = Counter(one.kernel for one in found[1:])
        assert max(by_kernel.values()) <= tuned.MOST
        assert max(Counter(one.schedule.config for one in found).values()) <= tuned.MOST_CUTS
        assert len({one.name for one in found}) == len(found)


def test_the_kernels_that_shipped_tables_choose_ship():
    assert tuned.shipped_configs() == []
    problem = PROBLEMS[0]
    wanted = worth_measuring(problem)[-1]
    entries = {key_of(problem): choice(wanted), "experts": choice(wanted)}
    gone = {key_of(PROBLEMS[2]): choice(wanted, config="gone")}
    table(entries | gone).write(tables.SHIPPED / tables.file_name(GPU))
    assert tuned.shipped_configs() == [wanted.schedule.config]
    assert spec_of(wanted.schedule.config) in shipped_specs()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_name_schedules_that_there_are(path: Path):
    """A table is measured anew when a change to selection leaves some of its entries without a meaning."""
    table = TunedTable.read(path)
    assert path.name == tables.file_name(table.gpu) and table.entries
    for key, entry in table.entries.items():
        found: Any = None
        if (problem := problem_of(key)) is not None:
            found = find(problem, entry)
        elif (grouped := of_experts.problem_of(key)) is not None:
            found = of_experts.find(grouped, entry)
        assert found is not None, key
        assert entry.us <= entry.model_us


def test_a_table_does_not_hold_back_sixteen_rows_whose_limbs_stay():
    """An entry from before that kernel once did: it was measured, and nobody chose it on an H200."""
    (path,) = (path for path in SHIPPED if path.name == tables.file_name(GPU))
    shipped = TunedTable.read(path)
    for m in (9, 16):
        case = LinearProblem(m, 28672, 4096, 4096, integers(4), "bf16")
        entry = shipped.entries.get(key_of(case))
        schedule = modelled(case) if entry is None else find(case, entry)
        assert schedule is not None
        config: Any = schedule.config
        assert isinstance(config.mainloop, ResidentLimbs)


def test_a_table_decides_for_its_problem_only():
    first, other = PROBLEMS[0], PROBLEMS[2]
    slow = worth_measuring(first)[-1]
    assert slow.schedule != modelled(first)
    table({key_of(first): choice(slow)}).write(own_path(GPU))
    assert tuned.tuned(first, GPU) == slow.schedule
    assert tuned.tuned(other, GPU) is None
    assert tuned.tuned(LinearProblem(**{**vars(first), "batch_invariant": True}), GPU) is None


def test_few_rows_are_served_as_the_next_number_that_a_table_has():
    """All are in one tile, and more take as long; of more rows than such a tile's a table decides for those it has."""
    eight, many = (replace(PROBLEMS[0], m=m) for m in (8, 64))
    entries = {key_of(one): choice(worth_measuring(one)[-1]) for one in (eight, many)}
    table(entries).write(own_path(GPU))
    for m in (1, 3, 5, 8):
        assert chosen(replace(eight, m=m), GPU) == find(replace(eight, m=m), entries[key_of(eight)])
    for m in (9, 16, 63):
        assert chosen(replace(eight, m=m), GPU) == modelled(replace(eight, m=m))
    assert chosen(many, GPU) == find(many, entries[key_of(many)])


@pytest.mark.parametrize("changes", [{"config": "gone"}, {"cut": 1000}, {"kernel": "other"}])
def test_an_entry_that_names_nothing_is_no_entry(changes):
    problem = PROBLEMS[0]
    table({key_of(problem): choice(worth_measuring(problem)[-1], **changes)}).write(own_path(GPU))
    assert tuned.tuned(problem, GPU) is None


def test_own_entries_come_before_shipped_ones():
    problem = PROBLEMS[0]
    shipped, own = worth_measuring(problem)[1:3]
    table({key_of(problem): choice(shipped)}).write(tables.SHIPPED / tables.file_name(GPU))
    assert tuned.tuned(problem, GPU) == shipped.schedule
    tables.tables.cache_clear()
    table({key_of(problem): choice(own)}).write(own_path(GPU))
    assert tuned.tuned(problem, GPU) == own.schedule


def test_tables_of_ones_own_change_nothing_of_what_ships(monkeypatch, tmp_path: Path):
    """Neither one that is kept beside compiled kernels nor one that is named, of whatever GPU."""
    table({}).write(tables.SHIPPED / tables.file_name(GPU))
    ships, configs = shipped_specs(), deferred_choice.shipped_configs()
    problem = LinearProblem(8, 4096, 4096, 4096, integers(4), "bf16")
    others = (one for one in worth_measuring(problem) if deferred_choice.deferred(one.schedule, GIVES) not in configs)
    slow = next(one for one in others if deferred_choice.deferred(one.schedule, GIVES))
    own = table({key_of(problem): choice(slow)})
    own.write(own_path(GPU))
    tables.tables.cache_clear()
    assert chosen(problem, GPU) == chosen_by(problem, own) == slow.schedule != chosen_by(problem, None)
    assert shipped_specs() == ships
    own.write(tmp_path / "named.json")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "named.json"))
    tables.tables.cache_clear()
    assert shipped_specs() == ships


def test_a_named_table_is_the_only_one(monkeypatch, tmp_path: Path):
    problem = PROBLEMS[0]
    table({key_of(problem): choice(worth_measuring(problem)[1])}).write(own_path(GPU))
    table({}).write(tmp_path / "mine.json")
    for named in (str(tmp_path / "mine.json"), ""):
        monkeypatch.setenv(tables.VARIABLE, named)
        tables.tables.cache_clear()
        assert tuned.tuned(problem, GPU) is None


BAD = [
    "",
    "[]",
    "{}",
    '{"version": 1}',
    "\udcff",
    json.dumps({"version": 1, "gpu": GPU, "dsl": None, "entries": {"a": {}}}),
]
BAD += [json.dumps({"version": 2, "gpu": GPU, "dsl": None, "entries": {}})]
BAD += [json.dumps({"version": 1, "gpu": GPU, "dsl": None, "entries": {"a": vars(Choice("k", "c", 1, "x", 1.0))}})]  # type: ignore


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_a_damaged_table_is_left_out_with_a_warning_and_refused_where_it_is_named(monkeypatch, content: str):
    path = own_path(GPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match="nvidia_h200.json is not used: .*(got no table|version 2)"):
        assert tuned.tuned(PROBLEMS[0], GPU) is None
    monkeypatch.setenv(tables.VARIABLE, str(path))
    tables.tables.cache_clear()
    with pytest.raises(TableError, match="nvidia_h200.json"):
        tuned.tuned(PROBLEMS[0], GPU)


@pytest.mark.parametrize(
    "changes, reason", [({"gpu": "NVIDIA A"}, "was measured on NVIDIA A"), ({"dsl": "0.1"}, "0.1, not")]
)
def test_a_table_from_elsewhere_is_left_out_with_a_warning(changes, reason: str):
    table({}, **changes).write(own_path(GPU))
    with tables.native.having(dsl_version=lambda: "4.8.1"), pytest.warns(RuntimeWarning, match=reason):
        assert tuned.tuned(PROBLEMS[0], GPU) is None


def test_files_are_named_after_the_gpu():
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("NVIDIA GH200 480GB") == "nvidia_gh200_480gb.json"
