"""From codes to the A operand without the packed bf16 additions and products that came with sm_90.

fma.rn.bf16x2 exists since sm_80 and rounds once, so a times 1 plus b is the sum, and a times b plus -0 the product,
signs of zeros included. The machine code is the same: HFMA2 is what the others become.
"""

from __future__ import annotations

from cutlass import Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.linear.decode import BF16_128, Decoder

BF16_ONE, BF16_MINUS_ZERO = 0x3F803F80, 0x80008000


class PortableDecoder(Decoder):
    """`Decoder` for sm_80 and later."""

    def _nibbles_to_bf16(self, words, offsets, masks):
        pairs = [((words[0] >> (4 * i)) & masks[0]) | Uint32(BF16_128) for i in range(4)]
        return [numbers.fma_bf16x2(pair, Uint32(BF16_ONE), offsets[i % 2]) for i, pair in enumerate(pairs)]

    def scaled(self, register, scale):
        """A packed pair times a scale, which is a pair too; rounded once."""
        if self.dtype == "bf16":
            return numbers.fma_bf16x2(register, scale, Uint32(BF16_MINUS_ZERO))
        return ptx.mul_f16x2(register, scale)
