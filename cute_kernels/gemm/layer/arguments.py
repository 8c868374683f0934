"""The arguments of the launch that computes several products of a layer.

For each product (`PRODUCTS`), addresses that are multiples of 16:

- codes, scales: the packed weight [n, k];
- norm: bf16 [k], the weight of the RMSNorm of the product's row, or 0;
- out: the product's results, bf16 [n], or [n / 2] with SwiGLU; 0 if only the next product reads them;

and numbers:

- n, a multiple of 64, or 0 if there is no such product; k, a multiple of 256;
- gated: 1 with SwiGLU, else 0; adds: 1 if the first product's results are added to the product's, else 0.

x: bf16 [1, k], the first product's row; each other product's row is the result of the one before. residual: bf16
[n], added to the first product, or 0.

exchange: `EXCHANGE_WORDS` words that no concurrent launch uses, EMPTY before the first launch: see :mod:`.exchange`.
num_ctas: how many CTAs are launched. eps, offset: of all norms, as in `cute_kernels.rms_norm`.
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
