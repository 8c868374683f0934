"""Launches of a product of experts by itself."""

from __future__ import annotations

import torch

from cute_kernels.gemm.experts import PackedExperts
from cute_kernels.gemm.experts.product import GroupedProduct


def launch_grouped(
    product: GroupedProduct,
    x: torch.Tensor,
    weight: PackedExperts,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **places: torch.Tensor | None,
) -> None:
    """Launches a product that writes ``out``. places: offsets and rows, or ids."""
    addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in places.items()}
    send = product.bound(weight.shape[0], activation, out.dtype)
    given = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "bias": bias}
    send(x=x, **given, out=out.data_ptr(), **addresses)
