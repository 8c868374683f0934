"""Numbers and scales that break careless quantisers; needs no compiler."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv import format_of
from layouts.kv.format import adversarial_rows


def awkward(head_dim: int) -> torch.Tensor:
    """fp32 rows that break careless quantisers: ties, constants, subnormals, huge and not finite numbers."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = list(adversarial_rows(head_dim)[40:])
    whole = torch.randint(-127, 128, (head_dim,), generator=generator).float()
    whole[:: head_dim // 8] = 127.0
    rows += [whole, whole + 0.5, whole * 2.0**-140, whole * 2.0**120, whole.abs() * 2.0**-133]
    rows += [(whole % 16) * step + 0.5 * step for step in (1.0, 2.0**-12, 3.0)]
    rows += [torch.zeros(head_dim), -torch.zeros(head_dim), torch.full((head_dim,), 7e4)]
    for value in (torch.nan, torch.inf, -torch.inf, 1e38):
        spoilt = torch.randn(head_dim, generator=generator)
        spoilt[head_dim // 3] = value
        rows += [spoilt, torch.full((head_dim,), value)]
    return torch.stack(rows + [rows[0]] * (-len(rows) % 4))  # whole warps


def scales_for(kv_format: str, num_heads: int, head_dim: int) -> list[torch.Tensor | None]:
    """Given scales: usual ones, and ones that no calibration gives."""
    shape = {"tensor": (), "head": (num_heads,), "channel": (num_heads, head_dim), None: None}[
        format_of(kv_format).given_scale
    ]
    if shape is None:
        return [None]
    generator = torch.Generator().manual_seed(1)
    usual = 0.02 * (0.5 + torch.rand(shape, generator=generator))
    odd = torch.tensor([0.0, -1.0, torch.inf, torch.nan, 2.0**-149, 3e38, 2.0**-61, 2.0**61])
    index = torch.randint(0, len(odd), shape, generator=generator) if shape else torch.tensor(4)
    return [usual, odd[index]]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal to the bit, except that any NaN is as good as another."""
    if got.dtype.is_floating_point:
        both_nan = got.isnan() & want.isnan()
        got, want = got.masked_fill(both_nan, 0), want.masked_fill(both_nan, 0)
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))
