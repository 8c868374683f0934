"""One launch of persistent CTAs computes several products, one after the other. Weights are loaded without a pause
between products.

Loader warps (:mod:`.loads`) draw work tiles, in the order of the products, and fill pipeline stages with the tiles'
weights. They wait for free stages, never for results of other CTAs. Consumer warps (:mod:`.multiply`) wait for all
results of the previous product, make limbs of these results, and multiply. A store warp (:mod:`.store`) adds up the
consumer warps' accumulators. It stores results in the exchange, where all CTAs read them.

docs/design/layer_products.md describes the design, docs/design/forward_progress.md why every launch ends.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.gemm.layer.arguments import PRODUCTS
from cute_kernels.gemm.layer.config import LayerProductsConfig
from cute_kernels.gemm.layer.exchange import draw
from cute_kernels.gemm.layer.loads import Loader
from cute_kernels.gemm.layer.memory import Product, Sizes, allocate, ask_early, init_barriers, tiles_of, write_table
from cute_kernels.gemm.layer.multiply import Multiplier
from cute_kernels.gemm.layer.store import Storer


class LayerProductsKernel:
    """The kernel of a layer's products, in the variant of its :class:`LayerProductsConfig`.

    | role | warps | waits | arrives |
    |---|---|---|---|
    | consumers | consumer_warps | slot full; stage full, each warp its own stages | slot empty; stage empty |
    | | | results of the product before, by polling; buffer empty | buffer full, one lane a warp |
    | loads | loader_warps | slot full; stage empty; a window of stages full | slot empty; stage full, with its bytes |
    | | | of the first: slot empty, before it draws | slot full |
    | store | 1 | slot full; buffer full: all consumer warps | slot empty; buffer empty |

    | pipeline | stages | arrivals to fill | to empty |
    |---|---|---|---|
    | weights | num_stages | 1, and the bytes | 1: a stage is one consumer warp's |
    | indices of work tiles, in slots | `SLOTS` | 1 | every warp |
    | sums of a work tile | `BUFFERS` | all consumer warps | 1 |

    The consumer warps meet at one named barrier before and after they make the limbs of a product's row.
    """

    def __init__(self, config: LayerProductsConfig):
        self.config = config
        self.loader, self.multiplier, self.storer = Loader(config), Multiplier(config), Storer(config)

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments of :data:`.arguments.LAYER_PRODUCTS`."""
        products, ends = [], []
        begin, place, rows, waited_for, used = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for names in PRODUCTS:
            fields = {field: getattr(given, name) for field, name in names.items()}
            there = fields["n"] > 0
            waited_for = Int32(cutlass.select_(there, begin, waited_for))
            used = Int32(cutlass.select_(there, place >> 2, used))
            products.append(Product(**fields, begin=begin, place=place, rows=rows))
            begin, rows = begin + tiles_of(fields["n"]), place
            place = place + (2 * fields["n"] >> fields["gated"])
            ends.append(begin)
        numbers = given.num_ctas, given.eps, given.offset, ptx.address(given.x), given.residual, given.exchange
        sizes = Sizes(ends[0], ends[1], ends[2], ends[3], waited_for, used, *numbers)
        options = {"grid": (given.num_ctas, 1, 1), "block": (self.config.num_threads, 1, 1), "stream": stream}
        self.kernel(sizes, *products).launch(**options, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(self, sizes, first, second, third, fourth):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = allocate(config)
        drawn = Int32(0)
        if warp == config.consumer_warps:
            if lane == 0:
                drawn = draw(sizes)
                ask_early(sizes, first)
        if warp == 0:
            if lane == 0:
                init_barriers(memory)
        if warp == config.num_warps - 1:
            if lane == 0:
                write_table(memory, (first, second, third, fourth))
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if warp < config.consumer_warps:
            self.multiplier.run(sizes, memory, warp, lane)
        elif warp < config.num_warps - 1:
            self.loader.run(sizes, memory, warp - config.consumer_warps, lane, drawn)
        else:
            self.storer.run(sizes, memory, lane)
