"""vLLM plug-in: vLLM's command line stays the same, and its layers run on these kernels.

vLLM finds :func:`register` as an entry point of the group ``vllm.general_plugins`` and calls it in each of its
processes; a program may call it, too, before it makes an engine. One file replaces one seam:

    linear      weight-only linear layers (AWQ, GPTQ, compressed-tensors)
    attention   quantised KV caches: vLLM's of 8 and 4 bits, and this package's own formats
    moe         layers of experts with 4- and 8-bit weights, gpt-oss's MXFP4 among them, and their routers
    mla         decoding of latent attention (DeepSeek), over whole contexts and chosen tokens
    fusion      gates, residual sums and norms around quantised layers, in the graphs that vLLM compiles
    float_linear
                linear layers in FP8, MXFP4 and NVFP4

`environment` has the switches, `versions` the names in each supported vLLM. Layers that are not supported here stay
with vLLM, and one line of its log says why.
"""

from __future__ import annotations

from cute_kernels.integrations.vllm.plugin import register

__all__ = ["register"]
