"""The arguments that kernels of routers are launched with. No other list of them exists.

experts, top_k, renormalize, groups, kept_groups, scale
                     as `Routing` has them; scoring: the index of the name in `SCORINGS`
ranks_logits         whether experts are ranked by their logits
padding              bool [T] or 0: tokens that are padding get ids of -1
bias, correction     [experts] or 0; bias_wide, correction_wide: whether they are fp32, else they are of the
                     configuration's dtype
ids, weights         int32 and fp32 [T, top_k]
of `ROUTER`          hidden [T, K] of the configuration's dtype, T at most MAX_TOKENS, K a multiple of 8, on 16
                     bytes; weight [experts, K], on 16 bytes; workspace: T * experts words, EMPTY; expert_shift:
                     log2 of the number of experts that a CTA has. All CTAs must fit on the GPU together.
of `SELECT`          logits fp32 [T, experts], without the bias
"""

from __future__ import annotations

from cute_kernels.runtime.launch_arguments import arguments, joined

_CHOICE = (
    *arguments("address", "bias", "correction", "padding", "ids", "weights"),
    *arguments(
        "int32", "top_k", "scoring", "ranks_logits", "renormalize", "groups", "kept_groups", "bias_wide",
        "correction_wide",
    ),
    *arguments("float32", "scale"),
)  # fmt: skip
ROUTER = joined(
    arguments("tensor", "hidden"),
    _CHOICE,
    arguments("address", "weight", "workspace"),
    arguments("int32", "experts", "expert_shift"),
)
SELECT = joined(arguments("tensor", "logits"), _CHOICE)
