"""Importer of layers whose codes are floats, E4M3 or E2M1, from the files of several projects.

| file | codes | scales | second level |
|---|---|---|---|
| compressed-tensors "nvfp4-pack-quantized" | `weight_packed` | `weight_scale` E4M3 | divided by `weight_global_scale` |
| compressed-tensors "mxfp4-pack-quantized" | `weight_packed` | `weight_scale` E8M0 | |
| compressed-tensors "float-quantized", "mxfp8-quantized" | `weight` E4M3 | `weight_scale` floating, E8M0 | |
| ModelOpt NVFP4, MXFP4, FP8 | `weight` uint8, E4M3 | `weight_scale` E4M3, E8M0, fp32 | times `weight_scale_2` |
| DeepSeek V3, vLLM's and transformers' "fp8" | `weight` E4M3 | times `weight_scale_inv`, `weight_scale` | |
| DeepSeek V4 | `weight` E4M3, int8 (two E2M1) | `scale` E8M0 | |
| torchao Float8Tensor, MXTensor, NVFP4Tensor | `qdata` | `scale` | times `per_tensor_scale` |
| gpt-oss | `blocks` uint8 | `scales` E8M0 | |

Dtypes and shapes determine the format, so one importer serves all of these sets of names. Scales of one byte are
reinterpreted, never converted: E8M0 comes as uint8 or as float8_e8m0fnu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.formats.weights.base import spelling
from cute_kernels.formats.weights.byte_scales import E8M0_MOST, E8M0_NAN
from cute_kernels.gemm.from_codes import pack_experts, pack_weight
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.integrations.checkpoints import fields
from cute_kernels.integrations.checkpoints.configuration import block_in

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP4, _FP8 = (torch.uint8, torch.int8), (E4M3,)
# By the dtypes of codes and scales: the formats, of which the shape of the scales chooses.
_FORMATS: tuple[tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...], tuple[str, ...]], ...] = (
    (_FP4, (E4M3,), ("nvfp4",)),
    (_FP4, (torch.uint8, E8M0), ("mxfp4",)),
    (_FP8, (torch.uint8, E8M0), ("fp8_block_e8m0", "e4m3_g64e8m0", "mxfp8")),
    (_FP8, _FLOATS, ("fp8", "fp8_block", "e4m3_g64f32", "e4m3_g32f32")),
)
_Made = TypeVar("_Made", PackedWeight, PackedExperts)


@dataclass(frozen=True)
class Names:
    """A project's names for the tensors of a layer.

    Args:
        codes, scales: names of these tensors.
        second: name of the tensor of the second level's scale; "" if there is none.
        divides: whether weights are divided by the second level's scale instead of multiplied.
        optional: whether the second level's scale may be missing, and is then 1.
    """

    codes: str
    scales: str
    second: str = ""
    divides: bool = False
    optional: bool = False


def from_float_codes(
    tensors: Mapping[str, torch.Tensor],
    names: Names,
    *,
    block: object = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PackedWeight:
    """Packs a layer's weight of floating codes: W[n, k] = number(code) * scale, multiplied or divided by the second
    level's scale.

    Args:
        tensors: the layer's tensors by name, as `cute_kernels.gemm.from_codes.pack_weight` takes them.
        names: the names of codes, scales and the second level.
        block: the entry of the configuration that says how many FP8 codes share a scale, as `block_in` takes it.
        dtype: dtype of the activations; only bf16 for scales of one byte.
        device: where the result is put, default the codes' device.

    Raises:
        TypeError, ValueError: a tensor is missing or does not fit, scales are not those of the blocks, a code or a
            scale is NaN, a scale is infinite, or a scale of the second level is not positive; the message names it.
    """
    (rows, inputs), codes, scales = block_in(block), tensors[names.codes], tensors[names.scales]
    if inputs and codes.dtype == E4M3 and codes.dim() == 2:
        found, wanted = list(scales.shape), [-(-codes.shape[0] // rows), -(-codes.shape[1] // inputs)]
        if [size for size in found if size > 1] != [size for size in wanted if size > 1]:  # [N, 1, K, 1] is ModelOpt's
            said = f"the configuration says blocks of {block}"
            raise ValueError(f"{names.scales}: got shape {found}, want {wanted}: {said}")
    return made_of(pack_weight, tensors, names, dtype, device)


def made_of(
    make: Callable[..., _Made],
    tensors: Mapping[str, torch.Tensor],
    names: Names,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> _Made:
    """Makes weights as `from_float_codes` does.

    make: `pack_weight`, or `pack_experts` for tensors [experts, ...] of all experts of a layer.
    """
    dim = 3 if make is pack_experts else 2
    codes, scales, second = tensors[names.codes], tensors[names.scales], tensors.get(names.second)
    fields.check_tensor(names.codes, codes, (*_FP4, *_FP8), dim, "[N, K], or [N, K / 2] of two codes a byte")
    fields.check_tensor(names.scales, scales, (*_FLOATS, torch.uint8, E4M3, E8M0), scales.dim(), "any")
    if scales.dim() == dim + 2 and scales.shape[1::2] == (1, 1):  # ModelOpt's blocks: [N / 128, 1, K / 128, 1]
        scales = scales[:, 0, :, 0]
    form = format_of_codes(names, codes, scales)
    if form.row_scales and second is None:
        if not names.optional:
            raise ValueError(
                f"{names.second or names.scales}: got no scale of the second level, want it in {spelling(form)}"
            )
        second = torch.ones((), dtype=torch.float32, device=scales.device)
    if second is not None:
        fields.check_tensor(names.second, second, (torch.float32,), second.dim(), "any")
        wrong = second[~((second > 0) & second.isfinite())]
        if len(wrong):
            raise ValueError(f"{names.second}: got {float(wrong[0]):g}, want positive finite numbers")
    if scales.dtype in (*_FLOATS, E4M3):  # of powers of two none is 0
        wide = scales.float()
        if not bool(wide.isfinite().all()):
            raise ValueError(f"{names.scales}: got values that are not finite, want finite ones")
        if not bool(wide.any()):
            raise ValueError(f"{names.scales}: got 0 everywhere, a layer without values, want some scale that is not 0")
    elif bool((scales.view(torch.uint8) == E8M0_NAN).any()):
        raise ValueError(f"{names.scales}: got {E8M0_NAN}, which is NaN, want exponents up to {E8M0_MOST}")
    options = {"second_divides": names.divides, "dtype": dtype, "device": device}
    try:
        made = make(form, codes.contiguous(), scales.contiguous(), second, **options)
        # E4M3's NaN is the largest byte, of signed numbers (0x7F) or of unsigned ones (0xFF): found without a copy.
        if form.nan_codes and (int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF):
            raise ValueError("codes: got codes that are NaN, want numbers")
        return made
    except (TypeError, ValueError) as error:
        own, colon, said = str(error).partition(":")
        called = {"codes": names.codes, "scales": names.scales, "second": names.second}
        raise type(error)(f"{called.get(own, own)}{colon}{said}") from error


def format_of_codes(names: Names, codes: torch.Tensor, scales: torch.Tensor) -> WeightFormat:
    """Returns the weight format that has the dtypes of a layer's codes and scales, and the group size that the scales'
    shape implies. Raises TypeError or ValueError if there is none."""
    found = [forms for of, by, forms in _FORMATS if codes.dtype in of and scales.dtype in by]
    if not found:
        raise TypeError(f"{names.scales}: got {scales.dtype} beside codes of {codes.dtype}, want scales of such codes")
    forms = [weight_format(name) for name in found[0]]
    n, k = codes.shape[-2], codes.shape[-1] * 8 // forms[0].bits
    for form in forms:
        size = form.group_size
        if not size and (scales.numel() == 1 or tuple(scales.shape) in ((n,), (n, 1))):
            return form
        if size and tuple(scales.shape[-2:]) in ((n, -(-k // size)), (-(-n // size), -(-k // size))):
            return form
    sizes = ", ".join(str(form.group_size) for form in forms if form.group_size)
    raise ValueError(
        f"{names.scales}: got shape {list(scales.shape)}, want those of groups of {sizes} inputs, of each "
        f"row or of square blocks, for codes of {list(codes.shape)}"
    )
