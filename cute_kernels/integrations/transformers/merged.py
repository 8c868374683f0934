"""Linear layers that read the same input, merged into one layer without a second copy of their weights.

`merge` joins layers and makes them views of the merged layer, so both can run. `interleave` makes the weight that the
"swiglu" epilogue reads, with gate's and up's rows alternating. The original layers cannot be views of this weight. So
`PartOfPair` replaces them, and makes their tensors on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cute_kernels.gemm import PackedWeight, QuantizedLinear, interleave_weights, reorder_outputs, slice_outputs
from cute_kernels.gemm.slices import outputs_at
from cute_kernels.gemm.weight import TENSOR_NAMES, TILE_N

_TENSORS = (*TENSOR_NAMES, "bias", "activation_scale")
_SHARED = ("perm", "input_scale", "activation_scale")
"""Tensors with an element for each input of a layer, or one for all; layers are merged only if these tensors are
equal."""


def merge(parts: Sequence[nn.Module]) -> nn.Module | None:
    """Makes one layer with the joined outputs of ``parts``. The parts' tensors become views of the new layer's tensors.

    Returns None, with nothing changed, for layers of other kinds or of different formats.
    """
    if all(type(part) is nn.Linear for part in parts):
        return _merge_dense(parts)
    if all(type(part) is QuantizedLinear for part in parts):
        return _merge_quantized(parts)
    return None


def is_merged(merged: nn.Module, parts: Sequence[nn.Module]) -> bool:
    """Returns whether the parts are still views of the merged layer, so none was moved, loaded or replaced."""
    name = "codes" if isinstance(merged, QuantizedLinear) else "weight"
    whole = _tensor(merged, name)
    place = 0 if whole is None else whole.data_ptr()
    for part in parts:
        tensor = _tensor(part, name)
        if tensor is None or tensor.data_ptr() != place:
            return False
        place += tensor.nbytes
    return True


def follow(whole: nn.Module | None, parts: Sequence[Any]) -> bool:
    """Gives a layer the settings of the layers that it computes, which may be set at any time. Returns False, with
    nothing changed, if the settings of ``parts`` differ."""
    if not isinstance(whole, QuantizedLinear):
        return True
    first, *others = ((part.batch_invariant, part.activations) for part in parts)
    scales = [part.activation_scale for part in parts]
    known = vars(whole).get("scales_of_parts") or [whole.activation_scale] * len(parts)
    is_new = any(scale is not before for scale, before in zip(scales, known, strict=True))
    if any(settings != first for settings in others) or (is_new and any(scale is not scales[0] for scale in scales)):
        return False
    if is_new:
        whole.activation_scale = scales[0]
        vars(whole).pop("scales_of_parts", None)  # all have one now
    if (whole.batch_invariant, whole.activations) != first:
        whole.batch_invariant, whole.activations = first
    return True


def unmerge(parts: Sequence[nn.Module]) -> None:
    """Gives merged layers memory of their own again."""
    for part in parts:
        for name, tensor in part._buffers.items():
            if tensor is not None and name not in _SHARED:
                setattr(part, name, tensor.clone())
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.clone()


def _tensor(layer: nn.Module, name: str) -> torch.Tensor | None:
    found = layer._parameters.get(name)
    return layer._buffers.get(name) if found is None else found


def _merge_dense(parts: Sequence[Any]) -> nn.Module | None:
    weights, biases = [part.weight for part in parts], [part.bias for part in parts]
    plain = all(type(x) is nn.Parameter and x.is_contiguous() for x in (*weights, *biases) if x is not None)
    one_form = len({(w.dtype, w.device, w.shape[1]) for w in weights}) == len({b is None for b in biases}) == 1
    if not (plain and one_form and len({id(w) for w in weights}) == len(parts)):
        return None
    merged = nn.Linear(weights[0].shape[1], sum(w.shape[0] for w in weights), bias=False, device="meta")
    for name, tensors in (("weight", weights), ("bias", biases)):
        if tensors[0] is None:
            continue
        whole = torch.cat([tensor.data for tensor in tensors])
        setattr(merged, name, nn.Parameter(whole, requires_grad=False))
        for tensor, view in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = view
    return merged.eval()


def _merge_quantized(parts: Sequence[Any]) -> QuantizedLinear | None:
    first = parts[0]
    if any(part.out_features % TILE_N or not _have_one_form(first, part) for part in parts):
        return None
    whole: dict[str, torch.Tensor | None] = {}
    for name in _TENSORS:
        tensors = [getattr(part, name) for part in parts]
        whole[name] = tensors[0] if name in _SHARED or tensors[0] is None else torch.cat(tensors)
    merged = _layer(whole, first, sum(part.out_features for part in parts))
    vars(merged)["scales_of_parts"] = [part.activation_scale for part in parts]  # by which `follow` knows new ones
    for name, tensor in whole.items():
        if tensor is None or name in _SHARED:
            continue
        for part, view in zip(parts, tensor.split([len(getattr(part, name)) for part in parts]), strict=True):
            setattr(part, name, view)
    return merged


def _layer(tensors: dict[str, torch.Tensor | None], like: QuantizedLinear, rows: int) -> QuantizedLinear:
    fields: dict[str, Any] = {name: tensors[name] for name in TENSOR_NAMES}
    form: dict[str, Any] = {"format": like.weight_format, "shape": (rows, like.in_features)}
    return _like(QuantizedLinear(PackedWeight(**fields, **form, check_values=False), tensors["bias"]), like)


def _like(layer: QuantizedLinear, other: QuantizedLinear) -> QuantizedLinear:
    """Gives a layer the settings of another one."""
    layer.batch_invariant, layer.activations = other.batch_invariant, other.activations
    layer.activation_scale = other.activation_scale
    return layer.train(other.training)


def _have_one_form(one: QuantizedLinear, other: QuantizedLinear) -> bool:
    """Returns whether two layers have the same format and settings, and the same permutation and scales of their
    inputs.
    """
    for name in ("weight_format", "in_features", "batch_invariant", "activations"):
        if getattr(one, name) != getattr(other, name):
            return False
    if (one.scales.dtype, one.codes.device) != (other.scales.dtype, other.codes.device):
        return False
    for name in _TENSORS:
        ours, theirs = getattr(one, name), getattr(other, name)
        if (ours is None) != (theirs is None):
            return False
        if name in _SHARED and ours is not None and not torch.equal(ours, theirs):
            return False
    return True


# -- gate and up ------------------------------------------------------------------------------------------------------


def interleave(parts: Sequence[nn.Module], order: torch.Tensor | None = None) -> QuantizedLinear | None:
    """Makes one layer [2 N, K] from a gate and an up projection. Even rows are rows of gate, odd rows are rows of up.

    parts: gate and up, or one layer with both, gate first. order: int [N]; pair i has row order[i] of gate and of up.
    The results are then in the order in which a following layer with act-order reads them. Returns None for layers that
    are not quantised or have different formats.
    """
    layers = [part for part in parts if type(part) is QuantizedLinear]
    if len(layers) < len(parts):
        return None
    if not all(_have_one_form(layers[0], layer) for layer in layers):
        return None
    if len(layers) == 2:
        gate, up = layers
        if gate.out_features != up.out_features:
            return None
        weights, biases = (gate.weight, up.weight), (gate.bias, up.bias)
    else:
        (both,) = layers
        half = both.out_features // 2
        weights = slice_outputs(both.weight, 0, half), slice_outputs(both.weight, half, 2 * half)
        biases = (None, None) if both.bias is None else both.bias.split(half)
    given = [bias for bias in biases if bias is not None]  # both, or none: they have one form
    bias = torch.stack(given, dim=1) if given else None
    if order is not None:
        weights = tuple(reorder_outputs(weight, order) for weight in weights)
        bias = None if bias is None else bias[order.to(bias.device).long()]
    bias = None if bias is None else bias.flatten()
    return _like(QuantizedLinear(interleave_weights(*weights), bias), layers[0])


class PartOfPair(QuantizedLinear):
    """A gate projection, an up projection, or both, whose rows are part of an interleaved layer (the pair).

    The module behaves as the layer that it replaces, in state dicts and calls. Its tensors are made at each read.
    `forward` takes longer, since it computes the whole pair. Weights cannot be loaded into it, but into the layer that
    `separate` makes.

    Args:
        pair: as `interleave` makes it.
        halves: (0,) for gate, (1,) for up, (0, 1) for both, one after the other.
        order: the argument of `interleave`.
    """

    def __init__(self, pair: QuantizedLinear, halves: tuple[int, ...], order: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.pairs = None if order is None else order.argsort()  # which pair each row is in
        self.pair = (pair,)  # a tuple: not a module of its own, whose tensors a state dict would list
        self.halves = halves
        self.shape = (pair.out_features // 2 * len(halves), pair.in_features)
        self.weight_format, self.batch_invariant = pair.weight_format, pair.batch_invariant
        self._activations = pair.activations
        self.training = pair.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        follow(self.pair[0], [self])
        return self.pair[0](x).index_select(-1, self._rows(x.device))

    def _rows(self, device: torch.device) -> torch.Tensor:
        """Returns the rows of the pair's layer that belong to the replaced layer, in that layer's order."""
        pairs = torch.arange(self.shape[0] // len(self.halves), device=device)
        pairs = pairs if self.pairs is None else self.pairs.to(device)
        return torch.cat([2 * pairs + half for half in self.halves])

    def separate(self) -> QuantizedLinear:
        """Makes the replaced layer again, bit for bit. It shares no memory with the pair, as files must not."""
        (pair,) = self.pair
        rows = self._rows(pair.codes.device)
        packed = outputs_at(pair.weight, rows)
        layer = _like(QuantizedLinear(packed, None if pair.bias is None else pair.bias[rows]), self)
        for name in _SHARED:
            if (tensor := getattr(layer, name)) is not None:
                setattr(layer, name, tensor.clone())
        return layer

    def extra_repr(self) -> str:
        return f"rows of {self.pair[0]}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PartOfPair:
        # By each part of a pair: what moves or casts a tensor leaves one alone that it has moved already.
        self.pair[0]._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        self.separate()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        errors.append(
            f"{prefix}codes: got a weight to load into a block that is accelerated, want restore(model) before"
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _TENSORS:
            return super().__getattr__(name)
        (pair,) = self.pair
        found = getattr(pair, name)
        return found if name in _SHARED or found is None else getattr(self.separate(), name)
