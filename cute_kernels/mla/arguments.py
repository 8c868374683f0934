"""The launch arguments of MLA decode's kernels.

Dense and sparse decode both have `ROWS`. q is bf16 or fp16 [batch, q_len, num_heads, head_dim]. The addresses are of
out [batch, q_len, num_heads, 512] in q's dtype, lse fp32 [batch, q_len, num_heads], max_logits (shaped as lse, or
address 0) and sinks (fp32 [num_heads], or address 0). If num_parts > 1, decode writes partials
(:class:`.work.Results`), and the combining kernel writes out, lse and max_logits. num_parts 0 means stream-K; partials
and flags are then the addresses that `PartialExchange` takes. num_ctas: CTAs of the launch; 0 for the kernel for few
heads.

A cache has `PAGES`. Pages lie ``page_stride`` bytes apart, the page_size tokens of a page ``token_stride`` bytes apart.
Both strides are multiples of 16. If a page holds first all data, then all scales, token_stride is that of the data.

`SPARSE` has num_tokens, the number of tokens in the cache, at most 2**31 - 1; indices int32 [batch, q_len, topk]; and
topk_length int32 [batch] or 0. The extra cache has all these arguments, too. Without an extra cache, extra_topk is 0
and extra_page_size 1.

`PAGED` has table int32 [batch, max_pages], rows ``table_stride`` elements apart, and seq_lens int32 [batch]: queries
see the first seq_lens[b] tokens of request b. causal: 1 if query i of q_len sees only the tokens up to seq_lens[b] -
q_len + i, else 0.

The kernel that adds up parts has `COMBINE`; its out is a tensor. row_bits: a CTA adds up 2**row_bits rows, each with
the same number of the groups of 128 threads of the CTA (`CombineConfig.slots`).
"""

from __future__ import annotations

from cute_kernels.runtime.launch_arguments import Argument, LaunchArguments, arguments, joined

ROWS = (
    *arguments("tensor", "q"),
    *arguments("address", "out", "lse", "max_logits", "sinks", "partials"),
    *arguments("float32", "softmax_scale"),
    *arguments("int32", "num_parts", "num_ctas"),
    *arguments("address", "flags"),
)
PAGES = (
    *arguments("address", "cache"),
    *arguments("int64", "page_stride"),
    *arguments("int32", "token_stride", "page_size"),
)
CHOSEN = (
    *PAGES,
    *arguments("int32", "num_tokens"),
    *arguments("address", "indices"),
    *arguments("int32", "topk"),
    *arguments("address", "topk_length"),
)
EXTRA = "extra_"
TABLE = (
    *PAGES,
    *arguments("int32", "num_pages"),
    *arguments("address", "table"),
    *arguments("int32", "table_stride", "max_pages"),
    *arguments("address", "seq_lens"),
    *arguments("int32", "causal"),
)
SPARSE = joined(ROWS, CHOSEN, (Argument(EXTRA + each.name, each.kind) for each in CHOSEN))
PAGED = joined(ROWS, TABLE)
COMBINE = joined(
    arguments("tensor", "out"),
    arguments("address", "lse", "max_logits", "sinks", "partials"),
    arguments("int32", "num_parts", "row_bits"),
)


def arguments_of(tokens: str) -> LaunchArguments:
    """Returns the launch arguments of decode. tokens: "sparse" or "paged"."""
    return SPARSE if tokens == "sparse" else PAGED
