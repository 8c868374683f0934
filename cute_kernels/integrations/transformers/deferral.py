"""Two ways to save launches in a layer. A norm between two products needs no launch of its own
(`cute_kernels.quantized_linear_norm`). Or one launch computes all products of the layer
(`cute_kernels.quantized_layer`).

A layer is a list of products with norms between them:

    norm -> q, k, v -> attention -> o + sum, norm -> gate, up -> down + sum, the next layer's norm -> ...

A block gets the sum and norm that follow its last product (`Sum`). If the kernels of this product and of the next
block's first product support it, the block returns `NormedRows`, which the next product reads. A block's input may also
be a tensor, and a block can compute the norm of `NormedRows` itself. So a block that cannot use a deferred norm takes
only one more launch.

If one launch computes all products from one attention to the next, attention gets all of them (`Ending`). It returns
`LayerRows`, and the next attention finds its queries, keys and values computed (`Projected`).
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
"""Rows after their norm: the input of a product, and the result of a block that a norm follows."""
Rows: TypeAlias = "Normed | Projected"
"""The input of a block."""


def tensor_of(x: Rows) -> torch.Tensor:
    """Returns rows after their norm as a tensor. Launches the norm if it was deferred."""
    x = x.rows if isinstance(x, Projected) else x
    return x.normed() if isinstance(x, NormedRows) else x


def shaped(x: Rows) -> torch.Tensor:
    """Returns a tensor with the rows' shape, dtype and device; its values are not normed."""
    x = x.rows if isinstance(x, Projected) else x
    return x.rows if isinstance(x, NormedRows) else x


class Product:
    """The operands of a quantised layer's product; they are read again if the layer's tensors were replaced.

    Args:
        layer: any module; only a `QuantizedLinear` can be multiplied.
        in_order: whether x is already permuted to the layer's act-order.
    """

    def __init__(self, layer: nn.Module, in_order: bool = False) -> None:
        self.layer, self.in_order = layer, in_order
        self._weight: PackedWeight | None = None

    @property
    def weight(self) -> PackedWeight:
        """The layer's weight, which shares the layer's tensors."""
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
        """Returns whether the layer may produce or consume a deferred norm: whether it computes nothing but a 16-bit
        product and maybe a bias, has no hooks, and is not batch-invariant.
        """
        layer = self.layer
        if type(layer) is not QuantizedLinear or layer.batch_invariant:
            return False
        return layer.activations is None and not has_hooks(layer) and "forward" not in vars(layer)

    def __call__(self, x: Normed, activation: Activation | None = None) -> torch.Tensor:
        """Computes [..., N] of x [..., K]; [..., N / 2] with activation "swiglu"."""
        layer = self.layer
        assert isinstance(layer, QuantizedLinear)
        return quantized_linear(
            x, self.weight, layer.bias, activation=activation, batch_invariant=layer.batch_invariant,
            activations=layer.activations, activation_scale=layer.activation_scale,
        )  # fmt: skip


class Sum(NamedTuple):
    """The residual sum and its norm that follow a block.

    Attributes:
        residual: the tensor to which the block's results are added.
        norm: the norm of the sum; `is_plain` holds for it.
        taker: the product that reads the norm.
    """

    residual: torch.Tensor
    norm: nn.Module
    taker: Product

    def takes(self, x: torch.Tensor, product: Product) -> bool:
        """Returns whether the norm of this sum can be deferred to ``taker``, if ``product`` of x makes the block's
        results.

        The kernel of ``taker`` then applies the norm. If ``taker`` scales or permutes its inputs, one launch before it
        norms, scales and permutes them.
        """
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
        """Computes the product of x, the sum and its norm. Returns None if the norm cannot be deferred."""
        if not self.takes(x, product):
            return None
        weight, eps, offset = terms_of(self.norm)
        options = {"residual": self.residual, "norm": weight, "norm_eps": eps, "norm_offset": offset}
        return quantized_linear_norm(x, product.weight, product.bias, following=self.taker.weight, **options)


class Ending(NamedTuple):
    """The rest of a layer after attention, if it consists of products alone.

    Attributes:
        middle: the sum after attention's output projection.
        down: the MLP's last product.
        norm: the norm of the MLP's sum; `is_plain` holds for it.
        taker: the product that reads this norm; None after the last layer.
    """

    middle: Sum
    down: Product
    norm: nn.Module
    taker: Product | None

    def given(self, x: torch.Tensor, product: Product) -> NormedRows | LayerRows | None:
        """Computes the rest of the layer from attention's output x, if one launch can, and returns the layer's rows.

        If one launch cannot, computes only attention's own product, and returns the result of `middle.given`.
        """
        call = self._call(x, product)
        if call is not None and is_one_launch(call):
            return layer(call)
        return self.middle.given(x, product)

    def _call(self, x: torch.Tensor, o: Product) -> LayerCall | None:
        """Returns the arguments for one launch of all products up to the next attention. Returns None if the layer
        computes anything else between them."""
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
