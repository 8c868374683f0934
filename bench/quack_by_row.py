"""QuACK's product with weights of 8 bits, INT8 or FP8, and a scale for each output feature.

QuACK decodes such weights without their scales and leaves those to an epilogue of the caller's: this is it, and the
call with the tiles and splits that QuACK's own `quack.gemm_w4.gemm_w4a16` chooses. Importing this module wants QuACK.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quack.epilogue.frontend import gemm_epilogue  # pyright: ignore[reportMissingImports]
from quack.epilogue.ops import RowVecLoad  # pyright: ignore[reportMissingImports]
from quack.gemm import _split_k_buffers  # pyright: ignore[reportMissingImports]
from quack.gemm_config import SplitKMode  # pyright: ignore[reportMissingImports]
from quack.operand_transform.formats import decode_format  # pyright: ignore[reportMissingImports]
from quack.operand_transform.host import pick_w4_cfg  # pyright: ignore[reportMissingImports]


@gemm_epilogue(ops={"scale": RowVecLoad("scale")})
def scaled(acc, scale):
    """An output feature's sum times its scale, in fp32."""
    return {"D": acc * scale}


def prepare(codes: torch.Tensor, scales: torch.Tensor, form: str = "int8") -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of codes int8 [N, K], N a multiple of 128, and scales [N]. form: "fp8" for bytes that are E4M3."""
    n = codes.shape[0]
    blob, _ = decode_format(form).prepare(codes, None)
    scale, tile_k = scales.float()[None], decode_format(form).tile_k

    buffers = {}  # by rows; used again, as the kernel leaves them as it found them

    def product(x: torch.Tensor) -> torch.Tensor:
        m = x.shape[0]
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
        tile_m, tile_n, splits = pick_w4_cfg(m, n, x.shape[1] // tile_k, device=x.device)
        if splits > 1 and m not in buffers:
            buffers[m] = _split_k_buffers(out.T[None], SplitKMode.SERIAL, tile_m, tile_n, 1, 1, False)
        scaled.gemm(
            x,
            blob,
            out,
            epi_args={"scale": scale},
            transform_a=form,
            tile_M=tile_m,
            tile_N=tile_n,
            tile_K=tile_k,
            cluster_M=1,
            cluster_N=1,
            split_k=splits,
            split_k_buffers=buffers.get(m),
        )
        return out

    return product
