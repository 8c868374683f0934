"""Random norms and what they are in fp64."""

from __future__ import annotations

from typing import Any

import torch

# A bf16 or fp16 result is its fp64 value rounded once, but for the fp32 arithmetic before.
TOLERANCE = {torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.05}


def random_case(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    *,
    residual: bool = False,
    bias: bool = False,
    weight_dtype: torch.dtype | None = None,
    mean: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `rms_norm` or `layer_norm`; a kind without a bias gets none."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    n, weights = shape[-1], weight_dtype or dtype
    spread = torch.exp(2 * random(*shape[:-1], 1))  # rows of different magnitudes
    given: dict[str, Any] = {"x": (random(*shape) * spread + mean).to(dtype), "weight": (1 + random(n)).to(weights)}
    if residual:
        given["residual"] = (random(*shape) * spread).to(dtype)
    if bias and kind == "layer":
        given["bias"] = random(n).to(weights)
    return given


def in_fp64(kind: str, given: dict[str, Any], eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """The norm of x, or of the rounded sum, without any other rounding."""
    x, other = given["x"], given.get("residual")
    values = (x if other is None else x + other).double()
    if kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    y = values / (values.square().mean(-1, keepdim=True) + eps).sqrt() * (given["weight"].double() + weight_offset)
    return y if given.get("bias") is None else y + given["bias"].double()


def assert_close(got: torch.Tensor, want: torch.Tensor, least: float = 1e-6) -> None:
    """Every element, relative to its own size; sums of opposite signs to that of the row's terms as well."""
    tolerance = TOLERANCE[got.dtype]
    bound = tolerance * want.abs() + least + 4e-6 * want.abs().amax(-1, keepdim=True)
    excess = (got.double() - want).abs() - bound
    assert bool((excess <= 0).all()), f"off by up to {float(excess.max()):.3g} beyond the bound"
