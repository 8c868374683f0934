"""Activations in two limbs of 8 bits, integers or E4M3, written down independently of the kernels."""

from __future__ import annotations

import numpy as np
import torch

GROUP, E4M3_NAN = 128, 0x7F
ORDER = np.arange(GROUP).reshape(-1, 2, 8).transpose(0, 2, 1).reshape(-1)  # 0, 8, 1, 9, .. of each 16


def limbs_of(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [rows, groups, 2, 128], fp32 [groups, rows]): limbs in the order that operands want, and their scales.

    A scale is what a product of 16 times a code with a low limb counts. x: [rows, k], all of it finite.
    """
    values, step = in_steps(x, 15)
    fixed = np.rint(values).astype(np.int64)
    low = (fixed + 128) % 256 - 128
    high = (fixed - low) // 256
    assert np.abs(high).max() <= 127
    return np.stack([high, low], axis=2)[..., ORDER].astype(np.int8), (step / 16).astype(np.float32).T.copy()


def e4m3_limbs_of(x: torch.Tensor, unit: float = 2.0**-6) -> tuple[np.ndarray, np.ndarray]:
    """The same in bytes of E4M3, uint8, whose sum is x over the scale. The high limb has an input's first four bits.

    A scale is what a product of ``unit`` times a code with either limb counts.
    """
    values, step = in_steps(x, 7, rounds_up=False)
    mantissa, exponent = np.frexp(values)
    high = np.ldexp(np.trunc(mantissa * 16) / 16, exponent)
    limbs = torch.from_numpy(np.stack([high, values - high], axis=2)[..., ORDER]).to(torch.float8_e4m3fn)
    return limbs.view(torch.uint8).numpy(), (step / unit).astype(np.float32).T.copy()


def in_columns(limbs: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Limbs of up to four rows in eight columns, and their scales: column r has the even 16 inputs of row r and zeros,
    column r + 4 the odd ones. Columns of rows that are not there are NaN."""
    column, count = np.arange(8), len(limbs)
    row, there = np.minimum(column % 4, count - 1), column % 4 < count
    own = (np.arange(GROUP) // 16 % 2) == (column // 4)[:, None]
    found = np.where(own[:, None, None], limbs[row], 0).astype(limbs.dtype)
    found[~there] = E4M3_NAN
    return found, np.where(there, scales[:, row], np.float32(np.nan)).copy()


def in_steps(x: torch.Tensor, bits: int, *, rounds_up: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, groups, 128] over each group's power of two, and these powers: magnitudes have ``bits`` bits.

    rounds_up: 255/256 of a power of two count as that power, since of 16 bits 255.5 * 2**7 is the largest that a high
    limb of 127 takes.
    """
    rows, k = x.shape
    values = np.zeros((rows, -(-k // GROUP), GROUP))
    values.reshape(rows, -1)[:, :k] = x.double().numpy()
    largest = np.maximum(np.abs(values).max(axis=2), 2.0**-100)
    step = np.ldexp(1.0, np.frexp(largest)[1] - bits)
    if rounds_up:
        step = np.where(largest / step >= 255 * 2.0 ** (bits - 8), 2 * step, step)
    return values / step[..., None], step
