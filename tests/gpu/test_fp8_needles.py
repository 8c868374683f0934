"""FP8 products on the GPU find the needles among 32k and 128k keys that 16-bit products over the same cache find."""

import pytest
import torch

from cute_kernels import extend_attention
from tests.extend.fp8_needles import QUERIES, emulated, exact, make_hay


@pytest.mark.parametrize(("tokens", "weight", "margin"), [(32768, 0.01, 0.5), (131072, 0.01, 0.5), (131072, 0.02, 0.5)])
def test_needles_are_found_as_by_products_of_16_bits(tokens, weight, margin):
    hay = make_hay(tokens, weight, margin)
    q = hay.q.bfloat16().cuda()[:, None]  # [64, 1 head, 128]
    k, v = (x.to(torch.float8_e4m3fn).cuda()[None, :, None] for x in (hay.k, hay.v))
    one = torch.ones(1, device="cuda")
    lengths = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, QUERIES], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": starts, "kv_format": "e4m3_tensor", "k_scale": one, "v_scale": one, "causal": False}
    wide, narrow = (
        extend_attention(q, k, v, lengths, fp8_products=fp8, **options)[:, 0].cpu() for fp8 in (False, True)
    )
    want, emulation = exact(hay), emulated(hay)
    margins = hay.margins(want)
    # Nearer to a tie than twice what the emulated arithmetic moves, a query's word is the rounding's choice.
    decided = margins.abs() > 2 * (hay.margins(emulation.bfloat16()) - margins).abs().max()
    assert decided.sum() >= QUERIES // 3
    for out in (wide, narrow):
        assert torch.equal(hay.margins(out)[decided] > 0, margins[decided] > 0)
    off = [(x.double() - want).norm() for x in (narrow, emulation)]
    # The output is bf16; the emulation's is not: its values of mean 1 are 2^-9 off at most.
    assert off[0] < 1.5 * off[1] + 2**-9 * want.norm()
