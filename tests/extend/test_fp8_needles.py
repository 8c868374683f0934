"""What FP8 products' arithmetic makes of one key among thousands: docs/design/fp8_products.md has 32k and 128k."""

import pytest
import torch

from tests.extend.fp8_needles import BITS, cut, emulated, exact, make_hay


def test_accumulators_cut_off_toward_zero():
    x = torch.tensor([1 + 2.0**-BITS, -1 - 2.0**-BITS, 1 + 2.0 ** (1 - BITS), 3e5 + 1]).double()
    assert cut(x).tolist() == [1, -1, 1 + 2.0 ** (1 - BITS), 3e5 // 32 * 32]


@pytest.mark.parametrize(("weight", "margin"), [(0.1, 1.0), (0.02, 1.0)])
def test_two_levels_find_the_needles_that_16_bits_find(weight, margin):
    hay = make_hay(8192, weight, margin)
    want = hay.hits(exact(hay, torch.bfloat16))
    assert want > 0.7 and hay.hits(emulated(hay)) >= want - 2 / 64


def test_one_level_errs_more_the_more_keys_there_are():
    """Values of mean 1: sums grow, and what is added to them is cut off."""
    ratios = []
    for tokens in (2048, 16384):
        hay = make_hay(tokens, 0.01)
        want = exact(hay)
        two, one = ((emulated(hay, levels) - want).norm() for levels in (True, False))
        ratios.append(float(one / two))
    assert ratios[0] < ratios[1] and ratios[1] > 1.05
