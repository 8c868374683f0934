"""The definition of the norms, in fp32 with PyTorch's operators."""

from __future__ import annotations

import torch

from cute_kernels.norm.call import NormCall


def norm_reference(call: NormCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (y, sum) of a checked call as new tensors in x's dtype. The sum is x plus the residual; None without a
    residual.
    """
    total = None if call.residual is None else call.x + call.residual
    values = (call.x if total is None else total).float()
    if call.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + call.eps)
    y = scaled * (call.weight.float() + call.weight_offset)
    if call.bias is not None:
        y = y + call.bias.float()
    y = y.to(call.x.dtype)
    if call.input_scale is not None:
        y = y * call.input_scale
    return y if call.order is None else y.index_select(-1, call.order), total
