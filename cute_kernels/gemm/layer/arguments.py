"""The arguments that a launch of several products takes; they are listed nowhere else.

Of each product (`PRODUCTS`), addresses on 16 bytes: codes, scales of a weight [n, k]; norm: the weight of the RMSNorm
of its rows, bf16 [k], or 0; out bf16 [m, n], [m, n / 2] of swiglu, or 0 of a product whose results nobody else wants.
n, multiples of 64, 0 of a product that there is not; k, multiples of 256; gated: 1 of swiglu, else 0. adds: 1 of a
product that adds the first one's results, else 0.

x: bf16 [m, k], the first product's rows; those of another are the results of the one before. residual: bf16 [m, n],
added to the first product, or 0.

exchange: `EXCHANGE_WORDS` words that no other launch uses, EMPTY at first: see :mod:`.exchange`. num_ctas: that are
launched. eps, offset: of the norms.
"""

from __future__ import annotations

from cute_kernels.runtime.launch_arguments import arguments, joined

MOST_PRODUCTS = 4
ADDRESSES = ("codes", "scales", "norm", "out")
NUMBERS = ("n", "k", "gated", "adds")
PRODUCTS = [{field: f"{field}_{i}" for field in (*ADDRESSES, *NUMBERS)} for i in range(MOST_PRODUCTS)]
"""Names of each product's arguments, by field."""

LAYER_PRODUCTS = joined(
    arguments("tensor", "x"),
    arguments("address", *(names[field] for names in PRODUCTS for field in ADDRESSES), "residual", "exchange"),
    arguments("int32", *(names[field] for names in PRODUCTS for field in NUMBERS), "num_ctas"),
    arguments("float32", "eps", "offset"),
)
