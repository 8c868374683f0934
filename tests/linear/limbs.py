"""Activations in two limbs of 8 bits, written down independently of the kernels."""

from __future__ import annotations

import numpy as np
import torch

GROUP = 128


def limbs_of(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [rows, groups, 2, 128], fp32 [groups, rows]): limbs in the order that operands want, and their scales.

    A scale is what a product of 16 times a code with a low limb counts. x: [rows, k], all of it finite.
    """
    rows, k = x.shape
    values = np.zeros((rows, -(-k // GROUP), GROUP))
    values.reshape(rows, -1)[:, :k] = x.double().numpy()
    largest = np.maximum(np.abs(values).max(axis=2), 2.0**-100)
    # Below 2**15 - 128 in k blocks: 255.5 * 2**7 is the largest that a high limb of 127 leaves room for.
    step = 2.0 ** (np.floor(np.log2(largest * 1.0000001)) - 14)
    step = np.where(largest / step >= 255 * 2**7, 2 * step, step)
    fixed = np.rint(values / step[..., None]).astype(np.int64)
    low = (fixed + 128) % 256 - 128
    high = (fixed - low) // 256
    assert np.abs(high).max() <= 127
    order = np.arange(GROUP).reshape(-1, 2, 8).transpose(0, 2, 1).reshape(-1)  # 0, 8, 1, 9, .. of each 16
    limbs = np.stack([high, low], axis=2)[..., order].astype(np.int8)
    return limbs, (step / 16).astype(np.float32).T.copy()
