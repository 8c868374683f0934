"""SGLang's pool of K and V in this package's formats. A row has the bytes of one token of one KV head, scales included.

SGLang keeps everything else: slots, pages, the radix cache. Only the bytes of a slot differ.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from cute_kernels import append_kv
from cute_kernels.integrations import engine_cache
from cute_kernels.integrations.engine_cache import Formats
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows


class RowsPool(MHATokenToKVPool):
    """Buffers uint8 [slots, KV heads, bytes of a row]. SGLang treats them as FP8 buffers with a different number of
    columns.
    """

    @property
    def formats(self) -> Formats:
        found = rows.wanted_formats()
        assert found is not None
        return found

    def _kv_buffer_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        slots = self.size + self.page_size
        k_row, v_row = engine_cache.row_bytes(self.formats, self.head_dim)
        return (slots, self.head_num, k_row), (slots, self.head_num, v_row)

    def set_kv_buffer(
        self,
        layer: Foreign,
        loc_info: object,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: object = None,
        v_scale: object = None,
        **more: object,
    ) -> None:
        """Quantises new tokens and writes their rows, for SGLang's callers; the attention backend writes rows itself.
        cache_k, cache_v: [tokens, heads, columns]."""
        if given := [name for name, value in more.items() if value is not None]:
            raise NotImplementedError(f"set_kv_buffer: got {', '.join(given)}, want none")
        slots, _, _ = unwrap_write_loc(loc_info)
        k, v = engine_cache.paged(self.get_kv_buffer(layer.layer_id), self.formats, self.page_size)
        append_kv(cache_k, cache_v, k, v, kv_format=self.formats.name, slot_mapping=slots)
