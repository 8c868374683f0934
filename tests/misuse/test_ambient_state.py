"""What PyTorch is set to around a call changes nothing of it: autocast, default dtype and device, gradients.

Kernels see none of it. The references that serve CPU tensors, and what PyTorch computes before and after kernels, give
the same bits and results without a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from cute_kernels.gemm import pack_weight
from tests.misuse.calls import CALLS

WRITTEN = ("out", "residual_out", "q_out", "k_cache", "v_cache", "cache", "k_tail", "q_shift")
WEIGHTS = ("folding", "normed_rows")  # give back what they were given, or a model's weights
OBJECTS = ("quantized_model", "quantize_some", "calibrator", "kv_cache")
REPEATED = [name for name in CALLS if not name.startswith(OBJECTS)]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "elsewhere": lambda: torch.device("meta"),
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    return [each for part in result for each in tensors_of(part)] if isinstance(result, (tuple, list)) else []


def outcome(name: str, state: AbstractContextManager[Any], gradients: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """The result of a call, and all tensors that it gave or may have written."""
    torch.manual_seed(0)
    function, given = CALLS[name]()
    if gradients:
        for key, value in given.items():
            if key not in WRITTEN and isinstance(value, torch.Tensor) and value.is_floating_point():
                given[key] = value.detach().requires_grad_()
    with state:
        result = function(**given)
    return result, [*tensors_of(result), *(given[key] for key in WRITTEN if isinstance(given.get(key), torch.Tensor))]


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", REPEATED)
def test_a_calls_result_does_not_depend_on_what_pytorch_is_set_to(name):
    _, want = outcome(name, nullcontext())
    for state in STATES.values():
        assert_equal(outcome(name, state())[1], want)


@pytest.mark.parametrize("name", [name for name in REPEATED if name not in WEIGHTS])
def test_results_have_no_gradient(name):
    result, got = outcome(name, nullcontext(), gradients=True)
    assert not any(tensor.requires_grad for tensor in _results(result))
    assert_equal(got, outcome(name, nullcontext())[1])


def _results(result: Any) -> list[torch.Tensor]:
    if isinstance(result, (tuple, list)):
        return [each for part in result for each in _results(part)]
    return [result] if isinstance(result, torch.Tensor) else []


@pytest.mark.parametrize("name", ["autocast", "float16", "elsewhere"])
def test_a_number_as_second_scale_keeps_its_digits(name):
    codes, scales = (torch.full((64, n), 56, dtype=torch.uint8) for n in (64, 8))
    want = pack_weight("nvfp4", codes, scales, 0.0123456789)
    with STATES[name]():
        assert_equal([pack_weight("nvfp4", codes, scales, 0.0123456789).scales], [want.scales])


@pytest.mark.parametrize("name", ["decode", "norm_of_rows", "linear_layer", "mla", "merge"])
def test_results_of_an_operator_have_no_gradient_either(name):
    """What is traced, and tensors of other classes, go through it."""

    class Other(torch.Tensor):
        """No plain tensor."""

    function, given = CALLS[name]()
    first = next(iter(given))
    result = function(**given | {first: given[first].requires_grad_().as_subclass(Other)})
    assert not any(tensor.requires_grad for tensor in _results(result))
