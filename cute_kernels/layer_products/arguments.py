"""What a launch of several products is launched with: declared here, and nowhere else listed.

Addresses of each product (`PRODUCTS`), on 16 bytes: codes, scales of a weight [n, k]; x bf16 [m, k]; norm: the weight
of the RMSNorm of x, bf16 [k], or 0; residual bf16 [m, n], or 0; out bf16 [m, n], [m, n / 2] of swiglu. n, multiples of
64, 0 of a product that there is not; k, multiples of 256; gated: 1 of swiglu, else 0. x and residual of a product may
be out of one before.

The first product's x is a tensor, whose device and rows are the launch's.

counters: 96 words, EMPTY before and after. num_ctas: that are launched. eps, offset: of the norms.
"""

from __future__ import annotations

from cute_kernels.layer_products.config import MOST_PRODUCTS
from cute_kernels.runtime.launch_arguments import arguments, joined

ADDRESSES = ("codes", "scales", "x", "norm", "residual", "out")
NUMBERS = ("n", "k", "gated")
COUNTER_WORDS = 96
PRODUCTS = [{field: f"{field}_{i}" for field in (*ADDRESSES, *NUMBERS)} for i in range(MOST_PRODUCTS)]
"""Names of each product's arguments, by field."""

_addresses = [names[field] for names in PRODUCTS for field in ADDRESSES]

LAYER_PRODUCTS = joined(
    arguments("tensor", _addresses.pop(ADDRESSES.index("x"))),
    arguments("address", *_addresses, "counters"),
    arguments("int32", *(names[field] for names in PRODUCTS for field in NUMBERS), "num_ctas"),
    arguments("float32", "eps", "offset"),
)
