"""The code of the kernel that combines parts, thread by thread: results are those of the reference."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.attention.arguments import COMBINE
from cute_kernels.attention.combine.config import CombineConfig
from cute_kernels.attention.combine.kernel import CombineKernel
from cute_kernels.attention.reference import merge_states_reference
from simulator import Altered
from tests.attention.states import State, random_states
from tests.launchers import given_to
from tests.moe.machine import Machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOG2_E = math.log2(math.e)


class Launched:
    """A launch of the kernel on a machine of its own."""

    def __init__(self, config: CombineConfig, shape: tuple[int, ...], run_on):
        self.config, self.shape, self.machine = config, shape, Machine()
        run_on(Altered(self.machine))

    def run(self, strides: tuple[int, int], **addresses: int) -> State:
        dtype, rows = DTYPES[self.config.dtype], math.prod(self.shape[:-1])
        out = self.machine.put(torch.full(self.shape, -7.0, dtype=dtype))
        lse = self.machine.put(torch.full((rows,), -7.0))
        numbers = {"num_parts": 2, "sinks": 0, "last": 0} | addresses
        numbers |= {"lse": lse, "value_stride": strides[0], "sum_stride": strides[1]}
        given = SimpleNamespace(shape=self.shape, address=out)
        launches = []

        def launch(grid, block, **_):
            assert grid == (-(-rows // 4), 1, 1) and block == (128, 1, 1)
            blocks = [(i, 0, 0) for i in range(grid[0])]
            self.machine.run(lambda: CombineKernel.kernel(kernel, *launches[0]), blocks, 128)

        kernel = CombineKernel(self.config)
        kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)  # type: ignore
        named = (numbers[name] for name in COMBINE.names[1:])
        CombineKernel.launch(kernel, given_to(COMBINE, given, *named), None)
        return State(self.machine.get(out, self.shape, dtype), self.machine.get(lse, self.shape[:-1], torch.float32))


def merged(a: State, b: State, name: str, run_on) -> State:
    shape = tuple(a.out.shape)
    launched = Launched(CombineConfig(name, len(shape), states=True), shape, run_on)
    out_a, out_b, lse_a, lse_b = map(launched.machine.put, (a.out, b.out, a.lse, b.lse))
    return launched.run((out_b - out_a, lse_b - lse_a), values=out_a, sums=lse_a)


@pytest.mark.parametrize("shape", [(3, 2, 136), (1, 2, 1, 8)])
@pytest.mark.parametrize("name", list(DTYPES))
def test_two_states_are_merged_as_the_reference_does(name, shape, run_on):
    """In either order, so that one address is before the other."""
    a, b = random_states(shape, DTYPES[name])
    out, lse = merge_states_reference(*a, *b)
    for found in (merged(a, b, name, run_on), merged(b, a, name, run_on)):
        torch.testing.assert_close(found.out, out.to(DTYPES[name]), rtol=torch.finfo(DTYPES[name]).eps, atol=1e-6)
        torch.testing.assert_close(found.lse, lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_a_state_without_keys_counts_for_nothing_whatever_its_output_holds(empty, run_on):
    a, b = random_states((2, 2, 64), torch.bfloat16)
    b.lse.fill_(empty)
    b.out.fill_(math.nan)
    a.lse[1, 1] = empty
    found = merged(a, b, "bf16", run_on)
    assert torch.equal(found.out.view(-1, 64)[:3], a.out.view(-1, 64)[:3]) and not found.out[1, 1].any()
    assert torch.equal(found.lse.view(-1)[:3], a.lse.view(-1)[:3]) and found.lse[1, 1] == -math.inf


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_splits_are_summed_and_queries_after_the_last_one_left_alone(sinks, run_on):
    """Three splits in fp32 with log2 sums, of which one row has no keys."""
    shape, written = (3, 2, 72), 2
    generator = torch.Generator().manual_seed(0)
    values, sums = torch.randn(3, *shape, generator=generator), 3 * torch.randn(3, *shape[:2], generator=generator)
    sums[:, 0, 1] = -math.inf
    launched = Launched(CombineConfig("bf16"), shape, run_on)
    first = launched.machine.put(torch.cat((values.flatten(), sums.flatten())))
    more = {} if sinks is None else {"sinks": launched.machine.put(sinks)}
    last = launched.machine.put(torch.tensor([written], dtype=torch.int32))
    strides = 4 * math.prod(shape), 4 * math.prod(shape[:2])
    found = launched.run(strides, values=first, sums=first + 3 * strides[0], num_parts=3, last=last, **more)
    logs = sums.double() / LOG2_E
    lse = torch.logsumexp(logs, dim=0)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double())
    weights = torch.where(logs.isinf(), 0.0, (logs - total).exp())
    want = (weights.unsqueeze(-1) * values).sum(0)
    torch.testing.assert_close(found.out[:written].double(), want[:written], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(found.lse[:written].double(), lse[:written], rtol=1e-6, atol=1e-6)
    assert bool((found.out[written:] == -7.0).all()) and bool((found.lse[written:] == -7.0).all())
