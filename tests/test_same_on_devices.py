"""What quantises has the same bits on every device, as far as a CPU can tell: by which operations it asks for.

CUDA multiplies by the rounded reciprocal of a divisor that is a Python number, and has logarithms of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import quantize_activations, quantize_weight
from cute_kernels.formats.weights import registered_formats
from layouts.kv import Fp8E4M3, Fp8E5M2, Int4Row, Int8, KvRow, ZeroPointRow
from layouts.numbers import ceil_log2, quotient
from layouts.weights import fastertransformer


class OnEveryDevice(TorchDispatchMode):
    """Refuses quotients by Python numbers but powers of two, and logarithms."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        assert not name.startswith("log"), name
        if name.startswith("div") and not isinstance(args[1], torch.Tensor):
            assert math.frexp(args[1])[0] in (0.5, -0.5), f"divided by {args[1]}"
        return func(*args, **(kwargs or {}))


def quantized_row(row: KvRow) -> torch.Tensor:
    x = torch.randn(4, 2, row.head_dim, generator=torch.Generator().manual_seed(1))
    return row.quantize(x, row.compute_scale(x) if isinstance(row, Int8 | Fp8E4M3) else None)


W = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
ROWS: list[KvRow] = [Int8(128), Int8(128, "channel"), Fp8E4M3(128, "tensor"), Fp8E5M2(128), Int4Row(128, 4)]
ROWS += [
    ZeroPointRow(128)
]  # not those of MLA: the reciprocal of 448 is rounded up, so their powers of two are the same
CALLS: dict[str, Callable[[], object]] = {
    **{form.key: partial(quantize_weight, W, format=form) for form in registered_formats()},
    **{f"{row.name} {row.head_dim}": partial(quantized_row, row) for row in ROWS},
    **{f"x {size}": partial(quantize_activations, W, size) for size in (0, 128)},
    "x with a scale": partial(quantize_activations, W, scale=torch.tensor(0.1)),
    **{
        f"columns {compat}": partial(fastertransformer.symmetric_quantize, W, 4, compat=compat)
        for compat in (False, True)
    },
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_quantisers_ask_for_nothing_that_differs(call: Callable[[], object]):
    with OnEveryDevice():
        call()


def test_such_operations_are_found():
    for call in (lambda: W / 448.0, lambda: (W * W).log2()):
        with pytest.raises(AssertionError), OnEveryDevice():
            call()
    with OnEveryDevice():
        assert torch.equal(quotient(W, 448.0), W / torch.tensor(448.0))


def test_exponents_are_exact():
    values = torch.tensor([2.0**-127, 0.5, 1.0, 1.0 + 2.0**-23, 1.5 * 2.0**-30, 2.0**-20 * (1 + 2.0**-23), 2.0**127])
    assert ceil_log2(values).tolist() == [-127, -1, 0, 1, -29, -19, 127]
