"""SGLang plug-in: SGLang's command line stays as it is, and quantised layers and attention run on these kernels.

SGLang finds :func:`register` as an entry point of the group ``sglang.srt.plugins`` and calls it in each of its
processes. `versions` has the names in each supported SGLang, `linear` the layers, `rows` the row counts of the server.
With CUTE_KERNELS_SGLANG=0 nothing is replaced. Layers that are not supported here stay with SGLang, and one line of its
log says why.
"""

from __future__ import annotations

from cute_kernels.integrations.sglang.plugin import register

__all__ = ["register"]
