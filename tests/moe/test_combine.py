"""The code of the kernel that adds up a token's results, thread by thread: accumulators are those of the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.experts import combine
from cute_kernels.gemm.experts.arguments import COMBINE
from cute_kernels.gemm.experts.config import COMBINE_BATCH, CombineConfig
from cute_kernels.gemm.experts.reference import combine_reference
from simulator import Altered
from tests.launchers import given_to
from tests.moe.machine import Machine, Turns

THREADS = 32  # of a CTA: Python threads are slow
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXPERTS = 8
MARGIN = 16  # elements behind the results, which nobody writes
UNKNOWN = {32: (-1, EXPERTS, -(2**31)), 64: (-1, EXPERTS, 2**32, 3 * 2**32 + 1, -(2**63), 2**63 - 1)}


def run(
    config: CombineConfig,
    results: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    run_on,
    part_bits: int = 0,
    methods: dict[str, Any] | None = None,
) -> torch.Tensor:
    """chosen: places or ids, [tokens, topk]; results: of 2**part_bits parts, one after the other; methods: in place of
    the kernel's own."""
    machine = Machine()
    changed = {combine: {"COMBINE_THREADS": THREADS}, combine.CombineKernel: methods or {}}
    run_on(Altered(machine, modules=changed))
    (tokens, topk), n, dtype = chosen.shape, results.shape[1], DTYPES[config.dtype]
    out = machine.put(torch.full((tokens * n + MARGIN,), -7.0, dtype=dtype))
    given = SimpleNamespace(shape=(tokens, n), address=out)
    launches = []

    def launch(grid, block, **options):
        assert grid[1:] == (tokens, 1) and block == (THREADS, 1, 1)
        blocks = [(i, token, 0) for token in range(grid[1]) for i in range(grid[0])]
        machine.run(lambda: kind.kernel(kernel, *launches[0]), blocks, THREADS)

    kind = combine.CombineKernel
    kernel = kind(config)
    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
    addresses = [machine.put(tensor) for tensor in (results, chosen, weights)]
    kind.launch(kernel, given_to(COMBINE, given, *addresses, topk, EXPERTS, part_bits), None)
    assert torch.all(machine.get(out + tokens * n * dtype.itemsize, (MARGIN,), dtype) == -7.0)
    return machine.get(out, (tokens, n), dtype)


def check(config: CombineConfig, results, chosen, places, weights, run_on) -> torch.Tensor:
    """Each batch's products are added in the order of assignments, so accumulators are near those of any order."""
    found = run(config, results, chosen, weights, run_on)
    wanted = combine_reference(results, places, weights, torch.float32)
    rounding = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-20}[config.dtype]
    torch.testing.assert_close(found.float(), wanted, rtol=rounding, atol=1e-5)
    return found


def results_of(count: int, n: int, dtype: str) -> torch.Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(count + n)).to(DTYPES[dtype])


def ids_of(tokens: int, topk: int, bits: int, share: float = 0.3) -> torch.Tensor:
    """A share of them of no expert."""
    generator = torch.Generator().manual_seed(tokens * topk)
    ids = torch.randint(0, EXPERTS, (tokens, topk), generator=generator)
    unknown = torch.tensor(UNKNOWN[bits])[torch.randint(0, len(UNKNOWN[bits]), ids.shape, generator=generator)]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < share, unknown, ids)
    return ids.to({32: torch.int32, 64: torch.int64}[bits])


def places_of(ids: torch.Tensor) -> torch.Tensor:
    """Assignments' own numbers, -1 of those of no expert."""
    own = torch.arange(ids.numel()).view(ids.shape)
    return torch.where((ids >= 0) & (ids < EXPERTS), own, -1).int()


DTYPE_PAIRS = [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")]
SIZES = [(1, 1, 4), (3, 2, 136), (2, 8, 130), (4, 3, 7), (1, 32, 8), (2, 11, 132), (3, 9, 1)]  # tokens, topk, n


@pytest.mark.parametrize("dtype, source", DTYPE_PAIRS)
@pytest.mark.parametrize("tokens, topk, n", SIZES)
def test_results_at_places_are_added_up(tokens, topk, n, dtype, source, run_on):
    count = tokens * topk
    results = results_of(count, n, source)
    places = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int().view(tokens, topk)
    places[places % 5 == 3] = -1
    weights = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(2))
    weights[places < 0] = torch.nan
    check(CombineConfig(dtype, source), results, places, places, weights, run_on)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("dtype, source", DTYPE_PAIRS)
@pytest.mark.parametrize("tokens, topk, n", SIZES)
def test_results_of_assignments_are_added_up_by_their_ids(tokens, topk, n, dtype, source, bits, run_on):
    """Those of no expert count for nothing, whatever their results, which nobody has written, and their weights."""
    ids = ids_of(tokens, topk, bits)
    places, results = places_of(ids), results_of(tokens * topk, n, source)
    weights = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(2))
    results[places.flatten() < 0] = torch.nan
    weights[places < 0] = torch.nan
    check(CombineConfig(dtype, source, bits), results, ids, places, weights, run_on)


@pytest.mark.parametrize("bits", [0, 32])
@pytest.mark.parametrize("shares", ["bf16", "fp16"])
@pytest.mark.parametrize("tokens, topk, n", SIZES)
def test_weights_of_16_bits_are_read_as_they_are(tokens, topk, n, shares, bits, run_on):
    ids = ids_of(tokens, topk, bits or 32)
    places, results = places_of(ids), results_of(tokens * topk, n, "fp32")
    weights = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(2)).to(DTYPES[shares])
    config = CombineConfig("fp32", id_bits=bits, shares=shares)
    found = run(config, results, ids if bits else places, weights, run_on)
    wanted = run(replace(config, shares="fp32"), results, ids if bits else places, weights.float(), run_on)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("part_bits", [1, 2])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("tokens, topk, n", SIZES)
def test_results_of_all_parts_of_k_are_added_up(tokens, topk, n, bits, part_bits, run_on):
    """Those of no expert count for nothing in any part."""
    ids, parts = ids_of(tokens, topk, bits), 1 << part_bits
    places, count = places_of(ids), tokens * topk
    results = results_of(parts * count, n, "fp32").view(parts, count, n)
    weights = torch.rand(tokens, topk, generator=torch.Generator().manual_seed(2))
    results[:, places.flatten() < 0] = torch.nan
    weights[places < 0] = torch.nan
    found = run(CombineConfig("fp32", id_bits=bits), results.flatten(0, 1), ids, weights, run_on, part_bits)
    wanted = combine_reference(results.sum(0), places, weights, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=2**-20, atol=1e-5)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("topk", [1, COMBINE_BATCH, COMBINE_BATCH + 1])
def test_a_token_without_an_expert_is_zero(topk, bits, run_on):
    ids = torch.tensor([UNKNOWN[bits][i % len(UNKNOWN[bits])] for i in range(2 * topk)]).view(2, topk)
    ids = ids.to({32: torch.int32, 64: torch.int64}[bits])
    nothing = torch.full((2 * topk, 12), torch.nan)
    found = run(CombineConfig(id_bits=bits), nothing, ids, torch.full((2, topk), torch.inf), run_on)
    assert torch.all(found == 0)


@pytest.mark.parametrize("bits", [32, 64])
def test_results_and_weights_of_experts_that_are_not_finite_are_seen(bits, run_on):
    ids = ids_of(3, 10, bits, share=0.0)
    results, weights = results_of(30, 8, "fp32"), torch.ones(3, 10)
    results[9, 3], weights[2, 9] = torch.nan, torch.nan
    found = run(CombineConfig(id_bits=bits), results, ids, weights, run_on)
    broken = found.isnan()
    assert broken[0].tolist() == [i == 3 for i in range(8)] and not broken[1].any() and broken[2].all()


@pytest.mark.parametrize("bits", [0, 32, 64])
def test_sums_by_ids_are_those_by_places(bits, run_on):
    """To the bit: the same products in the same order."""
    ids = ids_of(3, 10, 64)
    places, results = places_of(ids), results_of(30, 20, "fp32")
    weights = torch.rand(3, 10, generator=torch.Generator().manual_seed(2))
    by_places = run(CombineConfig("fp32"), results, places, weights, run_on)
    chosen = {0: places, 32: ids.clamp(-1, EXPERTS).int(), 64: ids}[bits]
    assert torch.equal(run(CombineConfig("fp32", id_bits=bits), results, chosen, weights, run_on), by_places)


@pytest.mark.parametrize("bits", [0, 32, 64])
def test_what_the_products_write_is_read_when_they_have_ended(bits, run_on):
    """Ids and weights may be read before: they are older than the products."""
    config = CombineConfig("fp32", id_bits=bits)
    loads = []
    wait, load = combine.CombineKernel.wait, combine.CombineKernel.load_vector

    def waits(self) -> None:
        wait(self)
        Turns.own().waited = True

    def load_vector(self, source):
        assert Turns.own().waited, "results are read too early"
        loads.append(source)
        return load(self, source)

    ids = ids_of(1, 3, 64, share=0.0)
    chosen = {0: places_of(ids), 32: ids.int(), 64: ids}[bits]
    methods = {"wait": waits, "load_vector": load_vector}
    run(config, results_of(3, 8, "fp32"), chosen, torch.ones(1, 3), run_on, methods=methods)
    assert len(loads) == 3 * 2


def test_names_tell_variants_apart_and_other_ids_are_refused():
    configs = [CombineConfig(dtype, source, bits) for dtype, source in DTYPE_PAIRS for bits in (0, 32, 64)]
    assert len({config.name for config in configs}) == len(configs)
    assert all(config.can_implement() is None for config in configs)
    assert "shares" in str(CombineConfig(shares="int8").can_implement())
    assert "id_bits" in str(CombineConfig(id_bits=16).can_implement())
