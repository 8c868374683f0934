"""The sections of docs/performance*.md: each has a record, words about it, and what makes its table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import by_format, decode_steps, e2e_steps, e2e_vllm, extend, linear, mla, moe, norm, report
from bench.report import Record

Section = tuple[str, str, str, Callable[[Record], str]]
"""A title, a record, words about it, what makes its table."""

ATTENTION: tuple[Section, ...] = (
    (
        "Decode attention",
        "main",
        "T = 8192 cached tokens, 8 query heads on 1 KV head, head_dim 128.",
        report.markdown,
    ),
    (
        "KV caches",
        "cache",
        "8-bit formats, pages, several queries, ragged batches, MHA. B requests of T cached tokens, HQ query heads on "
        "HKV KV heads, head_dim D.",
        lambda r: report.markdown(r, "cache"),
    ),
    (
        "Other shapes",
        "shapes",
        "Head dimensions, contexts, grouped heads; letters as above.",
        lambda r: report.markdown(r, "shapes"),
    ),
    (
        "Extend attention",
        "extend",
        "Chunks of a prefill and verified drafts (requests x new tokens over all tokens), batches that also decode, "
        "and a few queries of decode attention over INT4. 8 KV heads, head_dim 128, pages of 64.",
        extend.markdown,
    ),
    (
        "Steps with their append",
        "decode_apart",
        "RoPE, append and attention in one call, 32 query heads on 8 KV heads, pages of 64, in a CUDA graph.",
        decode_steps.markdown,
    ),
    (
        "Skewed batches",
        "decode_apart",
        "One long request among short ones, lognormal lengths; pages of 64. Graphs were captured with other lengths.",
        partial(report.markdown, suite="skewed"),
    ),
    ("More requests with their append", "decode_heads", "The same, and one KV head of 8.", decode_steps.markdown),
    ("Short contexts", "decode_short", "One request of few tokens.", partial(report.markdown, suite="short")),
    (
        "Sizes of heads",
        "decode_heads",
        "32 requests of 8192 tokens, several KV heads, pages of 64.",
        partial(report.markdown, suite="heads"),
    ),
    (
        "Pages and contiguous caches",
        "decode_heads",
        "128 requests of 8192 tokens and one KV head, with and without pages of 64.",
        partial(report.markdown, suite="pages"),
    ),
    (
        "Chosen blocks",
        "decode_blocks",
        "2048 of 32768 tokens, in blocks that each KV head chooses. The floor is that of what is chosen.",
        partial(report.markdown, suite="blocks"),
    ),
    ("MLA decode", "mla", 'Chosen tokens ("2048 of 32768") and whole contexts, against FlashMLA.', mla.markdown),
)
MODELS: tuple[Section, ...] = (
    (
        "Linear layers, H200",
        "linear",
        "4- and 8-bit weights (w4a16, w8a16), M rows of x, against cuBLAS, Marlin and Machete.",
        linear.markdown,
    ),
    ("Linear layers, H100", "linear_h100", "The same layers and peers.", linear.markdown),
    (
        "Mixtures of experts, H200",
        "moe",
        "4-bit weights, against torch and Marlin. The first product is the gate and up projections of all experts.",
        moe.markdown,
    ),
    ("Mixtures of experts, H100", "moe_h100", "The same layers and peers.", moe.markdown),
    (
        "A served model, H100",
        "e2e_vllm_h100",
        "Llama-3-8B served by vLLM with and without the plug-in, one engine after the other. "
        "[Serve with vLLM](tasks/vllm.md#what-it-brings) has the H200.",
        e2e_vllm.markdown,
    ),
    (
        "Formats of weights",
        "linear_formats",
        "Products of 16-bit activations, us; in brackets how many times the floor of what is packed; then the part of "
        "the fastest other library's time.",
        by_format.markdown,
    ),
    (
        "Formats of experts",
        "moe_formats",
        "Layers of two models' sizes, with gpt-oss's biases and clamps, us; in brackets how many times the floor of "
        "the active experts.",
        by_format.markdown,
    ),
    ("Norms", "norm", "RMSNorm in bf16, alone and with the residual sum, against torch's operators.", norm.markdown),
)
WHOLE: tuple[Section, ...] = (
    (
        "Whole models",
        "e2e_steps_default",
        "One token of each request through all layers, ms. `python -m bench e2e` measures it: 161 s here, with kernels "
        "that were compiled before. Torch has no kernel of its own for latent attention: BF16 of DeepSeek-V3's layers "
        "attends by its general one, so compare theirs with `bf16, mla_fp8`.",
        e2e_steps.markdown,
    ),
    (
        "Caches from 8 to 256 requests",
        "e2e_steps_caches",
        "Each smaller cache is faster than each larger one.",
        e2e_steps.markdown,
    ),
    (
        "gpt-oss-20b, and routers in one launch",
        "e2e_gpt_oss",
        "`route`: one launch from hidden states to each token's experts; norms are in the launch that adds to the "
        "residual stream. mxfp4: experts in MXFP4, projections of attention in bf16; mxfp4+w4: these in 4 bits.",
        e2e_steps.markdown,
    ),
)
FIGURES = {
    "main": {"decode_ratio": "Time over the streaming floor, by batch"},
    "shapes": {"decode_shapes": "Time over the streaming floor, by shape"},
    "mla": {"mla_rates": "Rates of MLA decode beside FlashMLA's"},
    "linear": {"linear_speed": "cuBLAS's time in bf16 over a layer's, by rows of x; dashed the fastest other library"},
    "e2e_steps_default": {
        "step_latency": "Milliseconds per token, by requests; dotted what reading the step's bytes takes",
        "step_throughput": "Tokens per second, by requests",
    },
}
