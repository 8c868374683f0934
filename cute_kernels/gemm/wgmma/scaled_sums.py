"""A variant of the mainloop in `.register_mainloop`: fp32 scales multiply the sums of a k block, not its weights.

So weights are decoded without being rounded, and results have the accuracy of exact weights. DeepGEMM's FP8 products
scale the sums of a k block, too.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32

from cute_kernels.device import ptx, wgmma
from cute_kernels.gemm.wgmma.reading import Lane
from cute_kernels.gemm.wgmma.register_mainloop import RegisterMainloop


class ScaledSumsMainloop(RegisterMainloop):
    """Adds up a k block's products of codes in registers of their own, and waits for them before the next k block."""

    def multiply_k_block(self, acc, memory, here, place: Lane, channel, last, releases, tile_m: int):
        """Adds W X^T of a k block to ``acc`` as `RegisterMainloop.multiply_k_block` does, and waits for its MMAs."""
        tiles, tile_acc, count = range(self.config.n_tiles), self.config.tile_m // 2, tile_m // 2
        # Zeros of registers of their own. If a second tile's zeros were written after the first tile's MMAs had begun,
        # ptxas would serialise all MMAs.
        sums = wgmma.wait_for([Float32(0.0)] * self.config.thread_acc, 0)
        super().multiply_k_block(sums, memory, here, place, channel, last, releases, tile_m)
        scales = [self.stages.load_numbers(memory, here.stage, place, tile)[0][0] for tile in tiles]
        finished = wgmma.wait_for([sums[tile * tile_acc + i] for tile in tiles for i in range(count)], 0)
        for number, value in enumerate(finished):
            tile, i = divmod(number, count)
            # A thread's i-th accumulator is of its row i // 2 % 2 of W.
            acc[tile * tile_acc + i] = ptx.fma(value, scales[tile][i // 2 % 2], acc[tile * tile_acc + i])

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """Returns the A operand of a k16 step: codes as numbers, not scaled unless the decoder itself scales them."""
        decoder, ((_, rows),) = self.stages.decoder, groups
        return decoder.fragment(words[step // decoder.steps], step % decoder.steps, rows, masks)
