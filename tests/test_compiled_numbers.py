"""Numbers that `torch.compile(dynamic=True)` traces for all values at once are checked, and reach the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, append_kv, layer_norm, quantized_linear, rms_norm
from cute_kernels.kv_cache import Rope
from tests.attention.cases import make_call as make_decode
from tests.extend.cases import make_call as make_extend
from tests.kv_cache.cases import Shape
from tests.kv_cache.cases import make_call as make_append
from tests.kv_cache.steps import make_step
from tests.kv_cache.test_append_cpu import arguments
from tests.linear.cases import known
from tests.mla.cases import make_dense, make_sparse
from tests.mla.test_ops_cpu import run_dense, run_sparse

NORMED = Shape("int4_g4", rope=Rope(128), norm=True)


def rows(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()


X, WEIGHT, PACKED = rows(3, 64), rows(64), known(72, 64).pack()
APPEND, STEP = arguments(make_append(NORMED)), make_step(NORMED, (5, 9))
DENSE, SPARSE = make_dense("mla_bf16", [3, 5]), make_sparse("mla_bf16")


def on_a_copy(
    operator: Callable[..., Any], given: dict[str, Any], numbers: dict[str, float]
) -> tuple[torch.Tensor, ...]:
    """What an operator returns, and what it writes to K's cache."""
    k_cache, v_cache = given["k_cache"].clone(), given["v_cache"].clone()
    return operator(**(given | {"k_cache": k_cache, "v_cache": v_cache} | numbers)), k_cache


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rms_norm": (lambda **numbers: rms_norm(X, WEIGHT, **numbers), ("eps", "weight_offset")),
    "layer_norm": (lambda **numbers: layer_norm(X, WEIGHT, WEIGHT, **numbers), ("eps",)),
    "quantized_linear": (
        lambda **numbers: quantized_linear(X, PACKED, norm=WEIGHT, **numbers),
        ("norm_eps", "norm_offset"),
    ),
    "append_kv": (lambda **numbers: on_a_copy(append_kv, APPEND, numbers), ("norm_eps",)),
    "append_and_decode": (
        lambda **numbers: on_a_copy(append_and_decode, STEP, numbers),
        ("norm_eps", "softmax_scale", "softcap"),
    ),
    "decode_attention": (make_decode("int4_g4", [5, 9]).run, ("softmax_scale", "softcap")),
    "extend_attention": (make_extend("bf16", [3, 2], [5, 9]).run, ("softmax_scale", "softcap")),
    "mla_decode": (lambda **numbers: run_dense(DENSE, **numbers), ("softmax_scale",)),
    "sparse_mla_decode": (lambda **numbers: run_sparse(SPARSE, **numbers), ("softmax_scale",)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_traced_for_all_values(name):
    torch.compiler.reset()
    operator, names = CASES[name]
    compiled = torch.compile(lambda numbers: operator(**numbers), fullgraph=True, backend="eager", dynamic=True)
    for value in (0.25, 0.5):
        numbers = dict.fromkeys(names, value)
        torch.testing.assert_close(compiled(numbers), operator(**numbers), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rms_norm", "decode_attention", "mla_decode"])
def test_numbers_that_do_not_fit_are_refused_while_traced(name):
    """Dynamo cannot put a number into a message: it leaves the error to Python, which it cannot in a full graph."""
    torch.compiler.reset()
    operator, names = CASES[name]
    compiled = torch.compile(lambda numbers: operator(**numbers), backend="eager", dynamic=True)
    for wrong in (-1.0, float("inf")):
        with pytest.raises(Exception, match=f"{names[0]}: got {wrong}, want"):
            compiled({names[0]: wrong})
