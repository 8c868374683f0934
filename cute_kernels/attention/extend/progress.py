"""How far a cache is unpacked while attention runs: words of global memory, EMPTY between launches.

Of a launch's workspace: the counter of work tiles (:mod:`.work`), that of chunks, that of warps which have left, one
not used, then a word for each tile of a request's KV head, K's beside V's: it counts the tile's chunks from EMPTY on.

Who waits for a tile waits for warps that have drawn its chunks and run. These wait for the other warps of their CTA
that unpack, each of which always comes, and for nobody else. The last warp to leave makes all words EMPTY again: of at
most 8192 blocks, see `schedule.MAX_UNPACKED_BYTES`, 32 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.attention.extend.policies import CHUNK_WORD, LEAVING_WORD, TILE_WORDS_AT
from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.cuda import EMPTY_WORD

BLOCK_BYTES = 8  # of a block's two words
NOTHING = 0  # address of the word of a chunk that there is not


@dsl_user_op
def add_released(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """Adds to a word of global memory: who then sees it by `load_acquired` sees all that was stored before."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    asm = "red.release.gpu.global.add.u32 [$0], $1;"
    llvm.inline_asm(None, operands, asm, "l,r,~{memory}", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_in_order(address: Int64, value: Int32, *, loc=None, ip=None) -> Int32:
    """Adds to a word of global memory and returns what it was: what all who have added before have done is seen, and
    what is done before is seen by who adds next."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    asm = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
    constraints = "=r,l,r,~{memory}"
    return Int32(llvm.inline_asm(Int32.mlir_type, operands, asm, constraints, has_side_effects=True, loc=loc, ip=ip))


@dataclass(frozen=True)
class Progress:
    """Where a launch's words lie; run-time values.

    words: address of the first. batch: requests. kv_heads: of each. tiles: of each of these.
    """

    words: Int64
    batch: Int32
    kv_heads: Int32
    tiles: Int32

    @cute.jit
    def draw(self, lane: Int32):
        """The number of a warp's next chunk; not to be waited for before it is used."""
        ticket = Int32(0)
        if lane == 0:
            ticket = ptx.atomic_add(self.words + 4 * CHUNK_WORD, Int32(1)) + 1
        return ticket

    def block(self, request, head, block) -> Int64:
        """Address of a block's words."""
        line = Int64(request) * self.kv_heads + head
        return self.words + 4 * TILE_WORDS_AT + (line * self.tiles + block) * BLOCK_BYTES

    @cute.jit
    def tell(self, word: Int64, lane: Int32):
        """Of a chunk whose rows a warp has stored, by its tile's word; of none where that is `NOTHING`."""
        if word != NOTHING:
            cute.arch.fence_proxy("async.global")  # who loads them is TMA
            cute.arch.sync_warp()
            if lane == 0:
                add_released(word, Int32(1))

    @cute.jit
    def wait(self, request: Int32, head: Int32, block: Int32, begin: Int32, ready: Int32, lane: Int32):
        """Waits until a block's tiles of K and V are unpacked; returns how many blocks are, up to 16: this one and
        those before it, as far as ``begin``. ready: what a tile's word counts up to. TMA may ask for them then."""
        own = cutlass.max(block - (lane >> 1), begin)
        address = self.block(request, head, own) + 4 * (lane & 1)
        known = Int32(0)
        while known == 0:
            word = numbers.load_acquired(address)
            votes = Uint32(cute.arch.vote_ballot_sync(Int32(word) == ready))
            there = votes & ~(votes + Uint32(1))  # up to the first that is not
            known = cute.arch.popc(there).to(Int32) >> 1
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        return known

    @cute.jit
    def leave(self, num_warps: Int32, lane: Int32):
        """What each of so many warps does last."""
        ticket = Int32(0)
        if lane == 0:
            ticket = add_in_order(self.words + 4 * LEAVING_WORD, Int32(1)) + 1
        if cute.arch.shuffle_sync(ticket, 0) == num_warps - 1:
            empty = Uint32(EMPTY_WORD)
            if lane == 0:
                ptx.store_global(self.words + 4 * CHUNK_WORD, [empty])
                ptx.store_global(self.words + 4 * LEAVING_WORD, [empty])
            first = self.block(Int32(0), Int32(0), lane)
            count = self.batch * self.kv_heads * self.tiles
            for i in cutlass.range(lane, count, WARP_THREADS, unroll=4):
                ptx.store_global(first + Int64(i - lane) * BLOCK_BYTES, [empty, empty])
