"""A step's attention metadata for vLLM. It says which requests decode, and which begin or continue a prompt. It is made
once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from cute_kernels.attention.checks import MAX_Q_LEN
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_schedule import DECODE_ROWS, count_tiles, serves_key_rows
from cute_kernels.integrations import attention_kernels
from cute_kernels.integrations.attention_kernels import Decodes
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import environment, kv_constants, prepare
from cute_kernels.integrations.vllm.attention_ranks import Ranks, ranks_of
from cute_kernels.runtime.gpu import GPU

MAX_PARTS = 8  # of a request: each reads its cache; dequantising costs as much as seven that do
FLASH_HEAD_SIZE = 256  # the largest of FlashAttention
MAX_CONTEXT = 1 << 16  # tokens that are dequantised at a time, or one request's if that has more
# New tokens of a request times heads of a group for which FlashAttention gets dequantised rows of caches that extend
# attention does not unpack: over 32k of a 16-bit format with codes, 512 x 4 take 489 us by extend attention and 513 so,
# 2048 x 4 take 1967 and 1652 (an H200).
ROWS_TO_DEQUANTISE_FOR = 4096


@dataclass(frozen=True)
class Context:
    """The positions of some requests' tokens in the cache, new tokens included, one request after the other.

    Attributes:
        pages: int64 [tokens], each token's page.
        places: int64 [tokens], each token's index within its page.
        starts: int32 [requests + 1], each request's first token.
        longest: the largest number of tokens of a request.
    """

    pages: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    longest: int


class Way(Enum):
    """How a request's new tokens are computed.

    FLASH: FlashAttention on the exact K and V; the new tokens begin the prompt. Layers that read another layer's cache
    have no K and V of their own, and use EXTEND instead.

    EXTEND: extend attention over the cache, which includes the new tokens.

    PARTS: decode attention on some new tokens at a time, each part as a request of its own.

    GATHER: FlashAttention on the request's dequantised rows. It is for many new tokens over caches that extend
    attention does not unpack, and for formats that extend attention cannot read.
    """

    FLASH = "flash"
    EXTEND = "extend"
    PARTS = "parts"
    GATHER = "gather"


@dataclass(frozen=True)
class Caches:
    """The properties that, together with lengths, decide the `Way` of a request. They are the same for all layers that
    share the metadata.

    Attributes:
        num_heads: number of heads of queries.
        num_kv_heads: number of heads of K and V.
        num_sms: number of SMs of the GPU.
        extend: whether extend attention reads the caches.
        unpacks: whether extend attention unpacks caches to 16 bits, once for many queries.
        key_rows: the configuration of extend attention's kernel for few queries of a request; None if there is none for
            these caches.
        shared: whether some layers read another layer's cache.
        wide: whether heads have more columns than FlashAttention supports. If so, every prompt is read from the cache.
        invariant: whether a token's result must not depend on the rest of the step. If so, extend attention reads every
            prompt and decode request from the cache, since its results for a row do not depend on other rows.
        apart: whether a request's tokens are split among GPUs. If so, extend attention computes continued prompts.
    """

    num_heads: int
    num_kv_heads: int
    num_sms: int
    extend: bool
    unpacks: bool = True
    key_rows: ExtendConfig | None = None
    shared: bool = False
    wide: bool = False
    invariant: bool = False
    apart: bool = False

    @property
    def flash(self) -> bool:
        """Whether FlashAttention on the exact K and V may compute the first tokens of a prompt."""
        return not (self.invariant or self.wide) and (self.extend or not self.shared)

    @property
    def gathers(self) -> bool:
        """Whether FlashAttention on dequantised rows computes many new tokens, although extend attention reads the
        caches."""
        return not (self.unpacks or self.invariant or self.wide or self.apart)


@dataclass(frozen=True)
class Piece:
    """Neighbouring requests of a step that are computed in one way.

    Attributes:
        way: the way in which these requests are computed.
        requests, tokens: slices of the step's requests and tokens.
        starts: int32 [requests + 1], each request's first new token within the piece.
        longest: the largest number of new tokens of a request.
        q_len: for PARTS, the number of new tokens of a part; each part is a request of its own for decode attention.
        seq_lens, block_table: lengths and pages of the requests or, for PARTS, of the parts; None for GATHER. For
            EXTEND with tokens that are split among GPUs, seq_lens are the numbers of tokens in this GPU's cache before
            the step.
        max_seq_len: for FLASH and EXTEND, a bound on seq_lens; None if the host knows none.
        context: for GATHER, the positions of all tokens.
    """

    way: Way
    requests: slice
    tokens: slice
    starts: torch.Tensor
    longest: int
    q_len: int = 0
    seq_lens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    max_seq_len: int | None = None
    context: Context | None = None


@dataclass
class Metadata(AttentionMetadata):
    """A step's metadata.

    Attributes:
        num_decodes: number of requests that decode; they come first.
        decode_len: number of new tokens of each of them.
        starts: int32 [requests + 1], each request's first new token in the step.
        seq_lens: int32 [requests]: number of tokens of each request, new tokens included. If tokens are split among
            GPUs, only tokens in this GPU's cache are counted.
        block_table: int32 [requests, pages].
        slot_mapping: int64 [tokens]: each new token's page * page size + index within the page, -1 for none.
        pieces: the requests that do not decode, in pieces.
    """

    num_decodes: int
    decode_len: int
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    pieces: tuple[Piece, ...]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_len

    def as_piece(self, way: Way) -> Metadata:
        """Returns the step's metadata with the decode requests as one more piece, computed in ``way``.

        New tokens of a piece are written to their slots in ``slot_mapping``. Tokens with slot -1 are not written. The
        caller chooses a way whose kernels take ``decode_len`` queries of a request.
        """
        decoding = Piece(
            way=way,
            requests=slice(0, self.num_decodes),
            tokens=slice(0, self.num_decode_tokens),
            starts=self.starts[: self.num_decodes + 1],
            longest=self.decode_len,
            q_len=self.decode_len,
            seq_lens=self.seq_lens[: self.num_decodes],
            block_table=self.block_table[: self.num_decodes],
        )
        return replace(self, num_decodes=0, pieces=(decoding, *self.pieces))


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes a step's metadata; decoding steps of one shape are captured in CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update: bool = True
    """With True, vLLM from 0.30 on captures all steps of a drafting model in one graph."""

    def __init_subclass__(cls, **named: Any) -> None:
        """Refuses every subclass. Attention layers of a few models make subclasses to change a step's metadata.

        Raises:
            NotImplementedError: always; it says how to leave such a model's attention to vLLM.
        """
        raise NotImplementedError(
            f"{cls.__qualname__}: attention that changes a step's metadata is not supported; "
            f"{environment.SWITCH}=linear,moe,mla leaves attention to vLLM"
        )

    def __init__(
        self, kv_cache_spec: Foreign, layer_names: list[str], vllm_config: Foreign, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.max_model_len = vllm_config.model_config.max_model_len
        self.page_size = kv_cache_spec.block_size
        self.ranks: Ranks | None = ranks_of(vllm_config)
        # Of a rank without requests, vLLM's drafting model runs over tables of requests that are gone, without slots.
        is_draft = getattr(kv_cache_spec, "is_draft", False)  # 0.33 on
        self.by_slots = is_draft and vllm_config.parallel_config.data_parallel_size > 1
        layers = vllm_config.compilation_config.static_forward_context
        _note_sharing(layers)
        kv_constants.give(layers, vllm_config, device)
        impls = [layers[name].impl for name in layer_names]
        self.caches = replace(caches_of(impls, device), apart=self.ranks is not None)
        assert self.reorder_batch_threshold is not None
        self.drafts = self.reorder_batch_threshold > 1
        if not self.caches.extend:  # which takes any number of queries
            self.reorder_batch_threshold = min(self.reorder_batch_threshold, MAX_Q_LEN)
        prepare.load(device, attention_kernels.specs(impls, decodes_of(vllm_config, self.page_size), device))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError(f"causal: got {common.causal}, want True")
        assert self.reorder_batch_threshold is not None
        decodes, others, *_ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold, require_uniform=True
        )
        starts = common.query_start_loc_cpu
        length = int(starts[1] - starts[0]) if decodes else 1
        metadata = Metadata(
            num_decodes=decodes,
            decode_len=length,
            starts=common.query_start_loc,
            seq_lens=common.seq_lens if self.ranks is None else common.dcp_local_seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            pieces=tuple(self._pieces(common, decodes)) if others else (),
        )
        if decodes and (self.caches.invariant or length > MAX_Q_LEN):
            return metadata.as_piece(Way.EXTEND)
        return metadata.as_piece(Way.PARTS) if decodes and self.by_slots else metadata

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Metadata:
        """Makes the metadata of a drafting step.

        If a request's context is full, vLLM sets the request's length to 1, and gives its token no slot. Decoding would
        write this token to the first position of the context. So decode requests then become a piece, whose tokens are
        written only to slots.
        """
        metadata = super().build_for_drafting(common_attn_metadata, draft_index)
        bound = common_attn_metadata.seq_lens_cpu_upper_bound
        within = bound is not None and int(bound.max()) <= self.max_model_len
        return metadata.as_piece(Way.PARTS) if metadata.num_decodes and not within else metadata

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Does nothing, since the metadata are views of vLLM's buffers, which already have the values of the next
        step.
        """

    def _pieces(self, common: CommonAttentionMetadata, first: int) -> Iterator[Piece]:
        """Yields the requests from ``first`` on, in pieces."""
        starts = common.query_start_loc_cpu.tolist()
        lengths = _lengths(common)
        begin = first
        while begin < common.num_reqs:
            if starts[begin + 1] == starts[begin]:
                begin += 1
                continue
            way = way_of(starts, lengths, begin, self.caches)
            end = piece_end(starts, lengths, begin, common.num_reqs, self.caches)
            if way is Way.EXTEND and fits_parts(starts, begin, end, self.caches):
                way = Way.PARTS
            yield self._piece(way, common, starts, lengths, slice(begin, end))
            begin = end

    def _piece(
        self, way: Way, common: CommonAttentionMetadata, starts: list[int], lengths: list[int], requests: slice
    ) -> Piece:
        begin, end = requests.start, requests.stop
        piece = Piece(
            way=way,
            requests=requests,
            tokens=slice(starts[begin], starts[end]),
            starts=common.query_start_loc[begin : end + 1] - starts[begin],
            longest=max(starts[i + 1] - starts[i] for i in range(begin, end)),
        )
        if way in (Way.FLASH, Way.EXTEND):
            tokens = common.seq_lens[requests]
            if self.ranks is not None:
                tokens = self.ranks.own_lengths(tokens - piece.starts.diff())
            return replace(
                piece,
                seq_lens=tokens,
                block_table=common.block_table_tensor[requests],
                max_seq_len=max(lengths[begin:end]),
            )
        if way is Way.GATHER:
            # Rows are put one after the other, which a bound would not do: vLLM's counts each draft as accepted.
            exact = common.seq_lens[requests].tolist() if self.drafts else lengths[begin:end]
            return replace(piece, context=self._context(common, exact, requests))
        return _in_parts(piece, common) if way is Way.PARTS else piece

    def _context(self, common: CommonAttentionMetadata, lengths: list[int], requests: slice) -> Context:
        table = common.block_table_tensor[requests]
        device, total = table.device, sum(lengths)
        counts = torch.tensor(lengths, dtype=torch.int64)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        on_device = starts.to(device, non_blocking=True)
        owner = torch.repeat_interleave(counts.to(device, non_blocking=True), output_size=total)
        position = torch.arange(total, device=device) - on_device[owner]
        pages = table[owner, position // self.page_size].long()
        return Context(pages, position % self.page_size, on_device, max(lengths))


def _note_sharing(layers: Mapping[str, Foreign]) -> None:
    """Records, in each layer's attention, which layer's cache it reads. For a drafting model vLLM may decide this only
    after the layer was made, and then sets it on the layer alone.
    """
    for layer in layers.values():
        if getattr(getattr(layer, "impl", None), "takes_constants", False):
            layer.impl.kv_sharing_target_layer_name = layer.kv_sharing_target_layer_name


def most_queries(vllm_config: Foreign) -> int:
    """Returns the largest number of new tokens of a decode request: its last token and the drafted ones."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return 1
    return 1 + (speculation.num_speculative_tokens or 0) * (2 if speculation.parallel_drafting else 1)


def decodes_of(vllm_config: Foreign, page_size: int) -> Decodes:
    """Returns the decode steps that an engine may run: their numbers of requests, queries and tokens."""
    return Decodes(
        batches=attention_kernels.batches_up_to(vllm_config.scheduler_config.max_num_seqs),
        q_len=min(most_queries(vllm_config), MAX_Q_LEN),
        max_seq_len=vllm_config.model_config.max_model_len,
        page_size=page_size,
        dtype=vllm_config.model_config.dtype,
        invariant=is_invariant(),
        ranks=vllm_config.parallel_config.decode_context_parallel_size,
    )


def is_invariant() -> bool:
    """Returns whether a token's result must not depend on the rest of the step."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def caches_of(impls: list[Any], device: torch.device) -> Caches:
    """Returns the `Caches` of layers that share a step's metadata."""
    few = [attention_kernels.key_rows_of(impl) for impl in impls]
    return Caches(
        num_heads=max(impl.num_heads for impl in impls),
        num_kv_heads=max(impl.num_kv_heads for impl in impls),
        num_sms=GPU.num_sms(device),
        extend=all(attention_kernels.can_extend(impl.formats, impl.head_size) for impl in impls),
        unpacks=all(attention_kernels.is_unpacked(impl.formats, impl.head_size) for impl in impls),
        key_rows=few[0] if all(few) else None,
        shared=any(map(attention_kernels.reads_anothers_cache, impls)),
        wide=any(impl.head_size > FLASH_HEAD_SIZE for impl in impls),
        invariant=is_invariant(),
    )


def way_of(starts: list[int], lengths: list[int], request: int, caches: Caches) -> Way:
    """Returns the way in which a request's new tokens are computed. It depends on their number and on the request's
    length.
    """
    new = starts[request + 1] - starts[request]
    if lengths[request] == new and caches.flash:
        return Way.FLASH
    if caches.extend:
        rows = new * caches.num_heads // caches.num_kv_heads
        as_it_lies = not caches.gathers or rows < ROWS_TO_DEQUANTISE_FOR
        return Way.EXTEND if as_it_lies else Way.GATHER
    return Way.PARTS if part_of(new) * MAX_PARTS >= new else Way.GATHER


def fits_parts(starts: list[int], begin: int, end: int, caches: Caches) -> bool:
    """Returns whether decode attention in parts is faster for requests ``begin`` to ``end`` - 1 than extend attention.

    It is faster if all of these conditions hold:

    - The requests have equally many new tokens, and each has at most `MAX_PARTS` parts.
    - The number of all parts times KV heads is at most the number of SMs, or of extend attention's work tiles.
    - Extend attention cannot use its kernel for few queries, which reads the cache once (`serves_key_rows`).

    The table has times on an H100, over 8192 tokens in FP8, with 32 query heads and 8 KV heads.

    | requests x new tokens | parts, us | tiles, us |
    |---|---|---|
    | 1 x 64 | 35 | 126 |
    | 32 x 16 | 217 | 405 |
    | 4 x 128 | 212 | 132 |
    | 32 x 64 | 826 | 649 |

    The kernel for few queries has keys as rows of MMAs. On an H200 it takes 150 us for 32 x 17 new tokens (176 us over
    int4_g4). Even 32 x 16 take 374 us in parts.
    """
    new, requests = starts[begin + 1] - starts[begin], end - begin
    if caches.invariant or caches.apart or any(starts[i + 1] - starts[i] != new for i in range(begin, end)):
        return False
    if caches.key_rows is not None and new * caches.num_heads // caches.num_kv_heads > DECODE_ROWS:
        shape = new * requests, requests, caches.num_heads, caches.num_kv_heads, caches.num_sms
        if serves_key_rows(caches.key_rows, *shape):
            return False
    parts = new // part_of(new)
    tiles = count_tiles(new * requests, requests, caches.num_heads, caches.num_kv_heads)
    return parts <= MAX_PARTS and parts * requests * caches.num_kv_heads <= max(caches.num_sms, tiles)


def part_of(new: int) -> int:
    """Returns the size of the equal parts into which ``new`` tokens are cut for decode attention."""
    return max(size for size in range(1, MAX_Q_LEN + 1) if new % size == 0)


def _in_parts(piece: Piece, common: CommonAttentionMetadata) -> Piece:
    """Cuts a piece into parts for decode attention. The piece's requests must have equally many new tokens. Each part
    is a request of its own, which ends with the part's last token."""
    q_len = part_of(piece.longest)
    chunks = piece.longest // q_len
    lengths, table = common.seq_lens[piece.requests], common.block_table_tensor[piece.requests]
    if chunks > 1:
        after = torch.arange((chunks - 1) * q_len, -1, -q_len, dtype=torch.int32, device=lengths.device)
        lengths = (lengths[:, None] - after).flatten()
        table = table.repeat_interleave(chunks, dim=0)
    return replace(piece, q_len=q_len, seq_lens=lengths, block_table=table)


def piece_end(starts: list[int], lengths: list[int], begin: int, end: int, caches: Caches) -> int:
    """Returns the end of a piece that begins with request ``begin``.

    The piece ends before the first request that is computed in a different way, or at the limit of tokens that are
    dequantised at a time.
    """
    way, new, total = way_of(starts, lengths, begin, caches), starts[begin + 1] - starts[begin], lengths[begin]
    for request in range(begin + 1, end):
        other = starts[request + 1] - starts[request]
        if other == 0 or way_of(starts, lengths, request, caches) is not way:
            return request
        if way is Way.PARTS and other != new:
            return request
        total += lengths[request]
        if way is Way.GATHER and total > MAX_CONTEXT:
            return request
    return end


def _lengths(common: CommonAttentionMetadata) -> list[int]:
    """Returns an upper bound on each request's tokens, new ones included. It is exact for requests that do not
    decode."""
    bound = common.seq_lens_cpu_upper_bound
    return (common.seq_lens.cpu() if bound is None else bound).tolist()
