"""Norms between a layer's products that take no launch (`cute_kernels.quantized_linear_norm`).

A layer is a list of products with norms between them:

    norm -> q, k, v -> attention -> o + sum, norm -> gate, up -> down + sum, the next layer's norm -> ...

A block is told what its last product's results go into (`Sum`). Where both kernels have the means it returns
`NormedRows`, and the next block's first product takes them. Each block takes tensors, too, and of `NormedRows` it can
make what its own norm would have given: whatever keeps a block from its kernels costs a launch, no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from cute_kernels import NormedRows, PackedWeight, QuantizedLinear, quantized_linear, quantized_linear_norm
from cute_kernels.integrations.transformers.norms import has_hooks, terms_of
from cute_kernels.linear.deferred import leaves_norm
from cute_kernels.names import Activation

Rows: TypeAlias = "torch.Tensor | NormedRows"
"""What a block reads: rows after their norm."""


def tensor_of(x: Rows) -> torch.Tensor:
    """Rows after their norm as a tensor, by a launch if there is none yet."""
    return x.normed() if isinstance(x, NormedRows) else x


def shaped(x: Rows) -> torch.Tensor:
    """A tensor of the rows' shape, dtype and device."""
    return x.rows if isinstance(x, NormedRows) else x


class Product:
    """A quantised layer as operands of its product; of what is loaded into it, too.

    Args:
        layer: any module; one of another kind has no product.
        in_order: whether x comes in the layer's own order (act-order) already.
    """

    def __init__(self, layer: nn.Module, in_order: bool = False) -> None:
        self.layer, self.in_order = layer, in_order
        self._weight: PackedWeight | None = None

    @property
    def weight(self) -> PackedWeight:
        """The layer's; it shares the layer's tensors."""
        layer, weight = self.layer, self._weight
        assert isinstance(layer, QuantizedLinear)
        if weight is None or layer.weight_format != weight.format or not self._is_of(layer, weight):
            weight = layer.weight
            self._weight = weight = replace(weight, perm=None, check_values=False) if self.in_order else weight
        return weight

    def _is_of(self, layer: QuantizedLinear, weight: PackedWeight) -> bool:
        same = layer.codes is weight.codes and layer.scales is weight.scales and layer.zeros is weight.zeros
        ordered = self.in_order or layer.perm is weight.perm
        return same and ordered and layer.input_scale is weight.input_scale

    def may_defer(self) -> bool:
        """Whether the layer is its product and nothing else, which nobody looks at."""
        layer = self.layer
        if type(layer) is not QuantizedLinear or layer.shifts is not None or layer.batch_invariant:
            return False
        return not has_hooks(layer) and "forward" not in vars(layer)

    def __call__(self, x: Rows, activation: Activation | None = None) -> torch.Tensor:
        """[..., N] of x [..., K]; half as many columns of "swiglu"."""
        layer = self.layer
        assert isinstance(layer, QuantizedLinear)
        invariant = layer.batch_invariant
        return quantized_linear(x, self.weight, layer.bias, activation=activation, batch_invariant=invariant)


class Sum(NamedTuple):
    """What a block's results go into.

    Attributes:
        residual: they are added to it.
        norm: of the sum, one that `is_plain`.
        taker: the product of the norm.
    """

    residual: torch.Tensor
    norm: nn.Module
    taker: Product

    def takes(self, x: torch.Tensor, product: Product) -> bool:
        """Whether a product of x can leave the norm to the next one."""
        weight, _, _ = terms_of(self.norm)
        if not (product.may_defer() and self.taker.may_defer()) or x.dim() == 0 or not x.numel():
            return False
        if not weight.dtype == x.dtype == self.residual.dtype or weight.device != x.device:
            return False
        if self.residual.shape[:-1] != x.shape[:-1] or self.residual.shape[-1] != product.weight.shape[0]:
            return False
        return leaves_norm(x.numel() // x.shape[-1], product.weight, self.taker.weight)

    def of(self, x: torch.Tensor, product: Product) -> NormedRows:
        """The sum, with its norm, of a product that it `takes`."""
        weight, eps, offset = terms_of(self.norm)
        bias, following = getattr(product.layer, "bias", None), self.taker.weight
        options = {"residual": self.residual, "norm": weight, "norm_eps": eps, "norm_offset": offset}
        return quantized_linear_norm(x, product.weight, bias, following=following, **options)
