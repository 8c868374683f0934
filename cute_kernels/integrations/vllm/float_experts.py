"""gpt-oss's layers of experts in vLLM, whose weights are MXFP4: a seam that is asked for by name alone.

Whether these products, by activations in 16 bits, are sooner done than vLLM's was not measured.
"""

from __future__ import annotations

import torch

from cute_kernels.formats.weights import MXFP4
from cute_kernels.gemm import pack_experts
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.integrations.vllm import moe
from cute_kernels.integrations.vllm.versions import Interface


def _pack(words: torch.Tensor, scales: torch.Tensor, zeros: None, *, gated: bool, **options: object) -> PackedExperts:
    """Packs experts' weights. words: bytes of two codes [E, K / 2, N]. scales: E8M0 [E, K / 32, N]. gated: whether
    gates come before ups."""
    codes, scales = (x.transpose(1, 2) for x in (words, scales.view(torch.float8_e8m0fnu)))
    if gated:
        codes, scales = (moe.expert_weights.gate_and_up_in_turn(x.view(torch.uint8)) for x in (codes, scales))
    scales = scales.contiguous().view(torch.float8_e8m0fnu)
    return pack_experts(MXFP4, codes.contiguous(), scales, dtype=torch.bfloat16)


SOURCE = moe.Source(
    "{}_weight",
    "{}_weight_scale",
    "",
    _pack,
    lambda method: (4, MXFP4.group_size, False, False),
    outputs_first=True,
    backends=("TRITON", "HUMMING", "MARLIN"),  # vLLM's order on Hopper; all load a checkpoint's own layout
    dtype=torch.bfloat16,
    seam="float_experts",
)


def replace(interface: Interface) -> str:
    """Makes vLLM's method for such layers use these experts; returns what was done."""
    moe.replace_experts(*interface.float_experts, SOURCE)
    return "experts of gpt-oss (MXFP4) run here"
