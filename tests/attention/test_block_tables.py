"""The kernel that makes the tables of chosen blocks, thread by thread: what PyTorch's operations make, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.attention.arguments import BLOCK_TABLES
from cute_kernels.attention.block_tables import BlockTablesConfig
from cute_kernels.attention.block_tables_kernel import BlockTablesKernel
from cute_kernels.attention.chosen_blocks import table_maker
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.runtime.sources import reached
from simulator import running
from tests.attention.block_tables import LISTS, odd_call, tables_of
from tests.launchers import given_to, recording
from tests.moe.machine import Machine


def simulated(table: torch.Tensor | None) -> Any:
    """The compiled function of `recording`, run on a machine; ``table``: what the address of pages is of."""

    def put(machine: Machine, tensor: torch.Tensor) -> SimpleNamespace:
        base = tensor if tensor._base is None else tensor._base
        address = machine.put(base) + 4 * tensor.storage_offset()
        return SimpleNamespace(shape=tensor.shape, stride=tensor.stride(), address=address)

    def function(*arguments: Any) -> None:
        machine, given = Machine(), dict(zip(BLOCK_TABLES.names, arguments, strict=True))
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        placed: dict[str, Any] = {name: put(machine, x) for name, x in tensors.items()}
        assert (given["block_table"] == 0) == (table is None)
        placed["block_table"] = 0 if table is None else put(machine, table).address
        kind, launches = BlockTablesKernel, []
        kernel = kind(BlockTablesConfig(32))  # more parts of a row, and fewer idle threads

        def launch(grid, block, **options):
            ctas = [(i, j, k) for k in range(grid[2]) for j in range(grid[1]) for i in range(grid[0])]
            machine.run(lambda: kind.kernel(kernel, *launches[0]), ctas, block[0])

        kernel.kernel = lambda *values: launches.append(values) or SimpleNamespace(launch=launch)  # type: ignore
        with running(machine):
            kind.launch(kernel, given_to(BLOCK_TABLES, *(given | placed).values()), None)
        for name in ("pages", "tokens"):
            tensors[name].copy_(machine.get(placed[name].address, tuple(tensors[name].shape), torch.int32))

    return function


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("page_size, tokens", [(None, 64), (64, 64), (16, 128)])
def test_tables_are_those_of_pytorchs_operations(lists, page_size, tokens):
    call, options = odd_call(lists, page_size, tokens, batch=2)
    with recording(lambda spec: simulated(options["block_table"])):
        pages, own_tokens = table_maker(call)(call.seq_lens, options)
    want_pages, want_tokens = tables_of(call)
    assert torch.equal(pages, want_pages) and torch.equal(own_tokens, want_tokens)


def test_it_is_compiled_anew_where_its_own_code_changes():
    files = {path.name for path in reached(AttentionSpec(BlockTablesConfig())).files}
    assert "block_tables_kernel.py" in files and "decode_kernel.py" not in files
