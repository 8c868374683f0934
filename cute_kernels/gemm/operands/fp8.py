"""FP8 operands: activations in E4M3 with fp32 scales, and the weights whose codes are E4M3 numbers exactly.

A product is the sum over K of codes of x times codes of W, times both scales, in fp32. Only x is rounded: E4M3, E2M1
and signed 4-bit integer codes of W are E4M3 numbers already. x has one scale per row. If the weight has 8-bit codes in
groups, x has one scale per 128 inputs of a row. A caller may instead give one scale for all of x (a checkpoint's static
scale); x then saturates at 448 times this scale.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_dtype, check_place, check_tensors
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.operands.fp8_config import SCALE_BITS, SCALE_ROUND_UP, X_GROUP, x_group
from cute_kernels.gemm.operands.fp8_launch import plain_rows
from cute_kernels.gemm.weight import has_values
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator, route

E4M3 = torch.float8_e4m3fn
MOST = 448.0
LEAST = 2.0**-110  # a largest input that counts: codes of smaller ones are 0, and so are those of rows of zeros


def quantize_activations(
    x: torch.Tensor, group_size: int = 0, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows of x to E4M3 with scales: x is about ``codes.float() * scales``, each scale over its group.

    A scale is a group's largest magnitude / 448, rounded up to four significant bits, so that codes times scales are
    bf16 numbers. A code is x times the scale's reciprocal (in fp32), rounded to nearest. Ties may be rounded either
    way. Codes saturate at 448. A group of zeros has codes 0 and a small scale. A group with infinities or NaN has a NaN
    scale, so its products are NaN. With a given scale, codes of infinities are 448 and codes of NaN are NaN.

    Args:
        x: bf16, fp16 or fp32 [..., K].
        group_size: 128: the number of consecutive inputs of a row that share a scale; the last group may be shorter. 0:
            all inputs of a row share one scale.
        scale: fp32 of one element, positive: the scale of all of x, in place of those of groups.

    Returns:
        codes float8_e4m3fn [..., K], scales fp32 [..., G], G being 1 with group_size 0 or a given scale.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
    """
    check_tensors(x=x)
    check_dtype("x", x, torch.bfloat16, torch.float16, torch.float32)
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x: got shape {list(x.shape)}, want [..., K]")
    if type(group_size) is not int or group_size not in (0, X_GROUP):
        raise ValueError(f"group_size: got {group_size!r}, want {X_GROUP}, or 0 for one scale per row")
    if scale is not None:
        check_scale(scale, x.device, "scale")
        group_size = 0
    tensors = {"x": x} if scale is None else {"x": x, "scale": scale}
    return route(cuda=_on_cuda, cpu=_quantized, operator=_operator, **tensors)(x, group_size, scale)


def check_scale(scale: torch.Tensor, device: torch.device, name: str = "activation_scale") -> None:
    """Raises TypeError or ValueError unless ``scale`` is one positive finite fp32 number on x's device."""
    check_tensors(**{name: scale})
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name}: got {scale.dtype} {list(scale.shape)}, want torch.float32 of one element")
    check_place(name, scale, device, "x")
    if has_values(scale) and not 0 < float(scale) < float("inf"):
        raise ValueError(f"{name}: got {float(scale):g}, want a positive finite number")


@torch.no_grad()
def _quantized(x: torch.Tensor, group_size: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `quantize_activations` in torch."""
    wide = x.float()
    if scale is not None:
        of_rows = scale.reshape(()).expand(*x.shape[:-1], 1)
        return _codes_of(wide * (1 / scale.reshape(()))), of_rows.clone(memory_format=torch.contiguous_format)
    k, size = x.shape[-1], group_size or x.shape[-1]
    groups = torch.nn.functional.pad(wide, (0, -k % size)).unflatten(-1, (-1, size))
    largest = groups.abs().amax(dim=-1)
    known = largest < float("inf")  # not so of NaN
    largest = torch.where(known, largest.clamp(min=LEAST), torch.nan)
    bits = (largest * (1 / MOST)).view(torch.int32)
    scales = ((bits + SCALE_ROUND_UP) & SCALE_BITS).view(torch.float32).where(known, torch.nan)
    codes = _codes_of(groups * torch.where(known, 1 / scales, 0.0).unsqueeze(-1))
    return codes.flatten(-2)[..., :k].contiguous(), scales


def _codes_of(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-MOST, MOST).to(E4M3)


def _on_meta(x: torch.Tensor, group_size: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    groups = -(-x.shape[-1] // group_size) if group_size else 1
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


def _on_cuda(x: torch.Tensor, group_size: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = plain_rows(x, group_size, scale)
    if rows is None:
        return _quantized(x, group_size, scale)
    with GPU.guard(x.device):
        codes, scales = rows.make(x.detach().view(-1, x.shape[-1]), scale)
    return codes.view(x.shape), scales.view(*x.shape[:-1], -1)


_operator = Operator(
    "quantize_activations(Tensor x, int group_size, Tensor? scale) -> (Tensor, Tensor)",
    cpu=_quantized,
    cuda=_on_cuda,
    meta=_on_meta,
)


def dequantize_activations(codes: torch.Tensor, scales: torch.Tensor, group_size: int = 0) -> torch.Tensor:
    """Returns the numbers fp32 [..., K] that codes and scales stand for. group_size: as for `quantize_activations`."""
    size = group_size if group_size and scales.shape[-1] > 1 else codes.shape[-1]
    return codes.float() * scales.repeat_interleave(size, dim=-1)[..., : codes.shape[-1]]


def fp8_rows(x: torch.Tensor, form: WeightFormat, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows of x in fp32, rounded to E4M3 as for products with weights of format ``form``."""
    group = x_group(form)
    return dequantize_activations(*_quantized(x, group, scale), group)
