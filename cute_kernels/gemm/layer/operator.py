"""The products of a layer as a registered operator, for graphs in which the number of rows is not known.

    rows, qkv = layer_products(x, residual, ...)

If one launch supports the number of rows, it computes all products. Otherwise the products are launched one after the
other.
"""

from __future__ import annotations

import torch

from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.layer.call import LayerCall
from cute_kernels.gemm.layer.config import FORMAT, config_for
from cute_kernels.gemm.ops import of_plain, weight_of
from cute_kernels.gemm.product import problem_of
from cute_kernels.gemm.served import is_noted
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator


def may_serve(weights: list[tuple[str, int, int]]) -> bool:
    """Whether a kernel can multiply by all of the weights (format, n, k) in one launch, for at least one number of
    rows."""
    fits = all(form == FORMAT.key and layer_call.serves_shape(n, k) for form, n, k in weights)
    return fits and config_for(max(k for _, _, k in weights)) is not None


def _may_load(rows: int, n: int, k: int, most_k: int, device: int) -> bool:
    """Whether the kernel may be loaded for ``rows`` rows. If a server has noted the product (`served`), the kernel must
    be compiled already, since no step may wait for the compiler.
    """
    if not layer_call.serves_rows(rows):
        return False
    if not is_noted(problem_of(rows, n, k, FORMAT, torch.bfloat16, device)):
        return True
    return any(default_cache().has(GemmSpec(config), arch_of(device)) for config in layer_call.configs_for(most_k))


def _apply(
    x, residual, o, o_scales, norm, gate_up, gate_up_scales, down, down_scales, following_norm, qkv, qkv_scales,
    heads, hidden, inner, projected, eps,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shapes = (hidden, heads), (2 * inner, hidden), (hidden, inner), (projected, hidden)
    fields = (o, o_scales), (gate_up, gate_up_scales), (down, down_scales), (qkv, qkv_scales)
    o, gate_up, down, qkv = (weight_of(*each, None, FORMAT, shape) for each, shape in zip(fields, shapes, strict=True))
    call = LayerCall(x, o, gate_up, down, qkv, residual, norm, following_norm, eps, 0.0)
    on_gpu, most_k = x.is_cuda or GPU.takes_cpu, max(heads, hidden, inner)
    one = on_gpu and _may_load(len(x), *shapes[2], most_k, x.get_device()) and layer_call.is_one_launch(call)
    found = layer_call.layer(call) if one else layer_call.layer_apart(call)
    assert found.qkv is not None
    return found.rows.rows, found.qkv


def _meta(x: torch.Tensor, *given) -> tuple[torch.Tensor, torch.Tensor]:
    _, hidden, _, projected, _ = given[-5:]
    return x.new_empty((x.shape[0], hidden)), x.new_empty((x.shape[0], projected))


layer_products = Operator(
    "layer_products(Tensor x, Tensor residual, Tensor o, Tensor o_scales, Tensor norm, Tensor gate_up, "
    "Tensor gate_up_scales, Tensor down, Tensor down_scales, Tensor following_norm, Tensor qkv, Tensor qkv_scales, "
    "int heads, int hidden, int inner, int projected, float eps) -> (Tensor, Tensor)",
    cpu=of_plain(_apply),
    cuda=of_plain(_apply),
    meta=_meta,
)
"""The operator: returns (rows [M, hidden] after a layer, qkv [M, projected] of the next one) from x [M, heads]. All
weights are in `config.FORMAT`."""
