"""Norms between a layer's products that take no launch (`cute_kernels.quantized_linear_norm`), and all of a layer's
products in one (`cute_kernels.quantized_layer`).

A layer is a list of products with norms between them:

    norm -> q, k, v -> attention -> o + sum, norm -> gate, up -> down + sum, the next layer's norm -> ...

A block is told what its last product's results go into (`Sum`). Where both kernels have the means it returns
`NormedRows`, and the next block's first product takes them. Each block takes tensors, too, and of `NormedRows` it can
make what its own norm would have given: whatever keeps a block from its kernels costs a launch, no more.

Where one launch serves the products from one attention to the next, attention is told of all of them (`Ending`). It
returns `LayerRows`, and the next attention finds its queries, keys and values made (`Projected`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from cute_kernels import NormedRows, PackedWeight, QuantizedLinear, quantized_linear, quantized_linear_norm
from cute_kernels.gemm.deferred import leaves_norm
from cute_kernels.gemm.layer.call import LayerCall, LayerRows, is_one_launch, layer, serves_rows
from cute_kernels.integrations.transformers.norms import Projected, has_hooks, terms_of
from cute_kernels.names import Activation

Normed: TypeAlias = "torch.Tensor | NormedRows"
"""Rows after their norm: what a product reads, and what a block returns where that goes into a norm."""
Rows: TypeAlias = "Normed | Projected"
"""What a block reads."""


def tensor_of(x: Rows) -> torch.Tensor:
    """Rows after their norm as a tensor, by a launch if there is none yet."""
    x = x.rows if isinstance(x, Projected) else x
    return x.normed() if isinstance(x, NormedRows) else x


def shaped(x: Rows) -> torch.Tensor:
    """A tensor of the rows' shape, dtype and device."""
    x = x.rows if isinstance(x, Projected) else x
    return x.rows if isinstance(x, NormedRows) else x


class Product:
    """A quantised layer as the operands of its product, read anew after loading.

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

    @property
    def bias(self) -> torch.Tensor | None:
        return getattr(self.layer, "bias", None)

    def may_defer(self) -> bool:
        """Whether the layer is nothing but its product, perhaps with a bias, and no hook sees it."""
        layer = self.layer
        if type(layer) is not QuantizedLinear or layer.batch_invariant:
            return False
        return layer.activations is None and not has_hooks(layer) and "forward" not in vars(layer)

    def __call__(self, x: Normed, activation: Activation | None = None) -> torch.Tensor:
        """Computes [..., N] of x [..., K]; half as many columns for "swiglu"."""
        layer = self.layer
        assert isinstance(layer, QuantizedLinear)
        return quantized_linear(
            x, self.weight, layer.bias, activation=activation, batch_invariant=layer.batch_invariant,
            activations=layer.activations, activation_scale=layer.activation_scale,
        )  # fmt: skip


class Sum(NamedTuple):
    """Where a block's results go: into a residual sum and its norm.

    Attributes:
        residual: they are added to it.
        norm: of the sum, one that `is_plain`.
        taker: the product of the norm.
    """

    residual: torch.Tensor
    norm: nn.Module
    taker: Product

    def takes(self, x: torch.Tensor, product: Product) -> bool:
        """Whether a product of x can defer the norm: to the next product's kernel, or to one launch that norms,
        scales and permutes that product's inputs."""
        weight, _, _ = terms_of(self.norm)
        if not (product.may_defer() and self.taker.may_defer()) or x.dim() == 0 or not x.numel():
            return False
        if not weight.dtype == x.dtype == self.residual.dtype or weight.device != x.device:
            return False
        if self.residual.shape[:-1] != x.shape[:-1] or self.residual.shape[-1] != product.weight.shape[0]:
            return False
        taker = self.taker.weight
        if taker.perm is not None or taker.input_scale is not None:
            return taker.codes.device == x.device and taker.format.activation_dtype(taker.scales.dtype) == x.dtype
        return leaves_norm(x.numel() // x.shape[-1], product.weight, taker)

    def given(self, x: torch.Tensor, product: Product) -> NormedRows | None:
        """Computes the product of x, the sum and its norm; None if the product does not defer the norm."""
        if not self.takes(x, product):
            return None
        weight, eps, offset = terms_of(self.norm)
        options = {"residual": self.residual, "norm": weight, "norm_eps": eps, "norm_offset": offset}
        return quantized_linear_norm(x, product.weight, product.bias, following=self.taker.weight, **options)


class Ending(NamedTuple):
    """Where attention's results go, if the rest of the layer is nothing but products.

    Attributes:
        middle: of attention's own product.
        down: the MLP's last product.
        norm: of its sum, one that `is_plain`.
        taker: the product of that norm; None after the last layer.
    """

    middle: Sum
    down: Product
    norm: nn.Module
    taker: Product | None

    def given(self, x: torch.Tensor, product: Product) -> NormedRows | LayerRows | None:
        """Computes the rest of the layer from attention's output x, if one launch does; else attention's product.

        Returns the rows that the layer ends with; else what `Sum.given` of `middle` returns.
        """
        call = self._call(x, product)
        if call is not None and is_one_launch(call):
            return layer(call)
        return self.middle.given(x, product)

    def _call(self, x: torch.Tensor, o: Product) -> LayerCall | None:
        """The arguments of the products from attention to attention, if the layer computes nothing else."""
        if x.dim() == 0 or not serves_rows(x.numel() // x.shape[-1]):
            return None
        gate_up, down, qkv = self.middle.taker, self.down, self.taker
        if not all(one is None or (one.may_defer() and one.bias is None) for one in (o, gate_up, down, qkv)):
            return None
        norm, eps, offset = terms_of(self.middle.norm)
        following, *numbers = terms_of(self.norm)
        if numbers != [eps, offset]:
            return None
        weights = o.weight, gate_up.weight, down.weight, None if qkv is None else qkv.weight
        return LayerCall(x, *weights, self.middle.residual, norm, following, eps, offset)
