"""Checks of the attention backend's steps: each token served once, by what its request asks for, and rightly."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check, check_once
from tests.integrations.vllm.steps import (
    Layer,
    TorchLaunches,
    builder,
    constants_file,
    flash_attention,
    serve_shared,
    serve_steps,
    step,
)
from tests.launchers import recording

STEPS = (
    # New tokens of each request, tokens after the step, speculated ones. What decodes comes first, then what continues,
    # then what begins; but pieces do not rely on it.
    ([1, 1, 1], [9, 1, 600], 0),
    ([1, 1, 5, 5, 16, 17, 40, 3, 30], [9, 70, 105, 66, 400, 300, 41, 3, 30], 0),
    ([1, 64, 64, 128, 144, 37], [9, 70, 105, 366, 400, 300], 0),
    ([7, 200], [7, 200], 0),
    ([40, 0, 3, 50], [41, 3, 3, 90], 0),
    ([4, 4, 4], [9, 44, 8], 3),
    ([4, 4, 1, 300], [9, 44, 8, 300], 3),
    ([1, 1], [9, 44], 3),
    ([17, 17, 17], [300, 400, 1 << 16], 0),
)


def check_parts(piece: Any, new: list[int], lengths: list[int], table: torch.Tensor) -> None:
    """Parts of a request are requests of their own that end sooner."""
    chunks = piece.longest // piece.q_len
    own = range(piece.requests.start, piece.requests.stop)
    assert all(new[i] == chunks * piece.q_len for i in own)
    assert piece.q_len <= 16 and chunks <= 8
    ends = [lengths[i] - part * piece.q_len for i in own for part in reversed(range(chunks))]
    assert piece.seq_lens.tolist() == ends
    assert torch.equal(piece.block_table, torch.stack([table[i] for i in own for _ in range(chunks)]))


def check_context(piece: Any, new: list[int], lengths: list[int], common: Any) -> None:
    """The tokens of a request are found in the order of their positions, the newest where they are appended."""
    from cute_kernels.integrations.vllm.attention_metadata import MAX_CONTEXT

    slots = piece.context.pages * 16 + piece.context.places
    bounds = piece.context.starts.tolist()
    own = range(piece.requests.start, piece.requests.stop)
    for place, i in enumerate(own):
        rows = slots[bounds[place] : bounds[place + 1]]
        assert rows.numel() == lengths[i] and rows.unique().numel() == lengths[i]
        start = int(common.query_start_loc[i])
        assert torch.equal(rows[-new[i] :], common.slot_mapping[start : start + new[i]])
    assert len(own) == 1 or bounds[-1] <= MAX_CONTEXT


@check
def every_token_of_a_step_is_served_once() -> None:
    from cute_kernels.integrations.vllm.attention_metadata import Way

    for extend, invariant in ((True, False), (False, False), (True, True)):
        ways = set()
        for new, lengths, speculative in STEPS:
            common = step(new, lengths, -(-max(lengths) // 16))
            metadata = builder(speculative, extend=extend, invariant=invariant).build(0, common)
            served = list(range(metadata.num_decode_tokens))
            assert all(count == metadata.decode_len for count in new[: metadata.num_decodes])
            for piece in metadata.pieces:
                ways.add(piece.way)
                served += range(piece.tokens.start, piece.tokens.stop)
                own = range(piece.requests.start, piece.requests.stop)
                assert (piece.starts[1:] - piece.starts[:-1]).tolist() == [new[i] for i in own]
                assert piece.longest == max(new[i] for i in own)
                assert all((lengths[i] == new[i]) == (piece.way is Way.FLASH) for i in own) or invariant
                if piece.way is Way.PARTS:
                    check_parts(piece, new, lengths, common.block_table_tensor)
                elif piece.way is Way.GATHER:
                    check_context(piece, new, lengths, common)
                elif piece.way is Way.EXTEND:
                    assert piece.seq_lens.tolist() == [lengths[i] for i in own]
                    decodes = invariant and own.start == 0 and new[0] <= 1 + speculative  # captured, for any length
                    assert piece.max_seq_len == (None if decodes else max(piece.seq_lens.tolist()))
                    assert torch.equal(piece.block_table, common.block_table_tensor[piece.requests])
            assert served == list(range(sum(new))), (new, served)
        expected = {Way.EXTEND} if invariant else {Way.FLASH, Way.PARTS, Way.EXTEND if extend else Way.GATHER}
        assert ways == expected, (extend, invariant, ways)


@check
def contexts_of_drafted_tokens_have_the_tokens_that_were_accepted() -> None:
    """On the host vLLM knows bounds of their lengths alone: as if every draft were accepted."""
    from cute_kernels.integrations.vllm.attention_metadata import Way

    new, lengths = [17, 19], [40, 57]
    common = step(new, lengths, pages=6)
    common.seq_lens_cpu_upper_bound = torch.tensor(lengths, dtype=torch.int32) + 13
    (piece,) = builder(24, extend=False).build(0, common).pieces
    assert piece.way is Way.GATHER
    check_context(piece, new, lengths, common)


@check
def drafted_tokens_without_a_slot_are_not_stored() -> None:
    """Of a request at the end of its context vLLM drafts on with the length 1 and no slot."""
    from cute_kernels.integrations.vllm import kv_formats
    from cute_kernels.integrations.vllm.attention_metadata import Way

    layer = Layer("auto", "fp16", heads=4, dim=64)
    common = step([1, 1], [1, 40], pages=32)
    common.slot_mapping[0] = -1
    common.seq_lens_cpu_upper_bound = torch.tensor([513, 40], dtype=torch.int32)  # of at most 512
    metadata = builder().build_for_drafting(common, 2)
    assert metadata.num_decodes == 0 and [piece.way for piece in metadata.pieces] == [Way.PARTS]
    impl = layer.make("cpu")
    cache = torch.zeros(64, kv_formats.page_bytes(impl.formats, 64, 16, 2), dtype=torch.uint8)
    q, k, v = (torch.randn(2, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    output = torch.full_like(q, torch.nan)
    impl.forward(SimpleNamespace(), q, k, v, cache, metadata, output)
    written = cache.view(torch.float16).view(64, -1).any(1).nonzero().flatten().tolist()
    assert written == [int(common.slot_mapping[1]) // 16], written
    assert not output.isnan().any()
    common.seq_lens_cpu_upper_bound[0] = 512
    assert builder().build_for_drafting(common, 2).num_decodes == 2
    # Where ranks have requests of their own, one without any drafts over the tables of requests that are gone.
    assert [builder(drafts_on=ranks).build(0, common).num_decodes for ranks in (0, 1, 2)] == [2, 2, 0]
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def metadata_of_drafting_steps_follow_vllms_buffers() -> None:
    """A graph of several steps is captured with the metadata of the first."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    common = step([1, 1], [9, 40])
    for make in (builder(), builder(invariant=True), builder(drafts_on=2)):
        metadata = make.build(0, common)
        if hasattr(AttentionMetadataBuilder, "supports_draft_decode_metadata_update"):
            assert make.supports_draft_decode_metadata_update
            make.update_draft_decode_metadata(metadata)
        for part in (metadata, *metadata.pieces):
            assert part.seq_lens.data_ptr() == common.seq_lens.data_ptr()
            assert part.block_table.data_ptr() == common.block_table_tensor.data_ptr()
        assert metadata.slot_mapping.data_ptr() == common.slot_mapping.data_ptr()


@check
def prompts_that_go_on_are_one_launch() -> None:
    """However many tokens each has; few of them over long contexts go to decode attention, which splits those."""
    from cute_kernels.integrations.vllm import attention_metadata
    from cute_kernels.integrations.vllm.attention_metadata import Way

    large: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8}
    for new, expected in (
        ([64] * 32, Way.EXTEND),
        ([128] * 4, Way.EXTEND),
        ([16, 17, 300, 5, 1], Way.EXTEND),
        ([4096], Way.EXTEND),
        ([16, 15], Way.EXTEND),
        ([16], Way.PARTS),
        ([64], Way.PARTS),
        ([16] * 32, Way.PARTS),
    ):
        made = builder(**large).build(0, step(new, [count + 400 for count in new], -(-max(new) // 16) + 25))
        assert [piece.way for piece in made.pieces] == [expected], (new, made.pieces)
    # Many queries want rows of 16 bits: of caches that extend attention does not unpack FlashAttention gets them.
    for new, invariant, expected in (
        ([2048], False, Way.GATHER),
        ([1024, 1100], False, Way.GATHER),
        ([1023], False, Way.EXTEND),
        ([128] * 32, False, Way.EXTEND),
        ([2048], True, Way.EXTEND),
    ):
        few = builder(**large, unpacks=False, invariant=invariant)
        made = few.build(0, step(new, [count + 400 for count in new], -(-max(new) // 16) + 25))
        assert [piece.way for piece in made.pieces] == [expected], (new, made.pieces)
    # FlashAttention takes no heads of 512 columns: their prompts are read from the cache.
    with recording(), mock.patch.object(attention_metadata, "is_invariant", lambda: False):
        for dim, is_wide in ((256, False), (512, True)):
            layer = Layer("fp8", "", heads=32, kv_heads=8, dim=dim)
            caches = attention_metadata.caches_of([layer.make("cpu")], torch.device("cpu"))
            assert caches.extend and (caches.wide, caches.flash) == (is_wide, not is_wide)
    for new, context in (([2048], 0), ([2048], 400), ([300, 31], 0)):
        wide = builder(**large, unpacks=False, wide=True)
        made = wide.build(0, step(new, [count + context for count in new], -(-max(new) // 16) + 25))
        assert [piece.way for piece in made.pieces] == [Way.EXTEND], (new, made.pieces)
    # Of few queries of many requests the cache is read once by keys as rows of products, whatever its codes are.
    for kv, form, taken in (
        ("auto", "int4_g4", True),
        ("fp8", "", True),
        ("auto", "fp16", False),
        ("auto", "fp16,int4_g4", False),
    ):
        layer = Layer(kv, form, heads=32, kv_heads=8)
        with recording(), mock.patch.object(attention_metadata, "is_invariant", lambda: False):
            caches = attention_metadata.caches_of([layer.make("cpu")] * 2, torch.device("cpu"))
        assert caches.extend and (caches.key_rows is not None) == taken, str(layer)
        assert caches.unpacks == (form != "fp16,int4_g4")
        for new, by_key_rows in (([16] * 32, True), ([16] * 2, False), ([8] * 32, False), ([9] * 32, True)):
            made = builder(**large, key_rows=caches.key_rows).build(0, step(new, [count + 400 for count in new], 26))
            expected = Way.EXTEND if taken and by_key_rows else Way.PARTS
            assert [piece.way for piece in made.pieces] == [expected], (str(layer), new, made.pieces)


@check
def steps_of_mixed_requests_give_attention_over_everything() -> None:
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    # Errors: what rounding to the cache's format costs.
    small: dict[str, Any] = {"heads": 4, "dim": 64}
    one_sm = {"num_sms": 1}  # then hardly anything goes in parts
    for layer, bound in (
        (Layer("auto", "fp16", **small), 2e-3),
        (Layer("auto", "fp16", caches=one_sm, **small), 2e-3),
        (Layer("auto", "fp16", window=24, soft_cap=3.0, **small), 2e-3),
        (Layer("auto", "fp16", sinks=True, **small), 2e-3),
        (Layer("auto", "fp16", speculative=3, caches={"invariant": True}, **small), 2e-3),
        (Layer("auto", "fp16", window=24, sinks=True, speculative=3, caches={"extend": False}, **small), 2e-3),
        (Layer("int8_per_token_head", **small), 0.03),
        (Layer("fp8", caches=one_sm, **small), 0.15),
        (Layer("fp8_per_token_head", window=24, speculative=3, **small), 0.15),
        (Layer("int4_per_token_head", **small), 0.5),
        (Layer("int4_per_token_head", window=24, sinks=True, soft_cap=3.0, speculative=3, caches=one_sm, **small), 0.5),
        (Layer("auto", "int4_g4", caches=one_sm, **small), 0.5),
        (Layer("auto", "int8_token_head,int4", caches={"extend": False}, **small), 0.5),
    ):
        given, expected = serve_steps(layer)
        error = float((given.double() - expected).abs().max())
        assert error < bound, (str(layer), error)
    layer = Layer("auto", "int8_token_head,int4", caches={"extend": False}, **small)
    found = []
    for order in ("NHD", "HND"):
        with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": order}):
            assert layer.make("cpu").formats.cache_layout == order
            found.append(serve_steps(layer)[0])
    assert torch.equal(*found)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def layers_that_read_anothers_cache_attend_over_it() -> None:
    """Their own keys and values are none: of a drafting model's layers they are not even written."""
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    small: dict[str, Any] = {"heads": 4, "dim": 64, "shared": True}
    different: tuple[dict[str, Any], ...] = ({}, {"num_sms": 1}, {"extend": False}, {"invariant": True})
    for layer, bound in (
        *((Layer("auto", "fp16", caches=caches, **small), 2e-3) for caches in different),
        (Layer("auto", "fp16", window=24, sinks=True, speculative=3, **small), 2e-3),
        (Layer("fp8", **small), 0.15),
    ):
        given, expected = serve_steps(layer)
        error = float((given.double() - expected).abs().max())
        assert error < bound, (str(layer), error)
    # vLLM may say so once the layer is made, to the layer alone.
    impl = Layer("auto", "fp16").make("cpu")
    builder(layers={"draft": SimpleNamespace(impl=impl, kv_sharing_target_layer_name="model.layers.0.self_attn.attn")})
    assert impl.kv_sharing_target_layer_name == "model.layers.0.self_attn.attn"
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def steps_of_any_number_of_drafted_tokens_are_captured_as_they_are_served() -> None:
    """Graphs are captured with contexts of the new tokens alone, and replayed with others."""
    for drafted in (3, 15, 16, 20, 31):
        make, count = builder(drafted), 1 + drafted
        captured, served = (make.build(0, step([count] * 2, lengths)) for lengths in ([count] * 2, [300, 410]))
        ways = [[piece.way for piece in metadata.pieces] for metadata in (captured, served)]
        assert captured.num_decodes == served.num_decodes and ways[0] == ways[1], (drafted, ways)
        assert captured.pieces == () or captured.pieces[0].max_seq_len is None
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    batches = (((0, 30), (1, 5), (2, 50)), ((0, 21), (1, 21), (2, 21)), ((0, 21), (1, 21), (2, 4), (3, 50)))
    given, expected = serve_steps(Layer("auto", "fp16", heads=4, dim=64, speculative=20), batches=batches)
    assert float((given.double() - expected).abs().max()) < 2e-3
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def steps_that_warm_up_are_not_looked_at_in_debug_mode() -> None:
    """All of their requests have the same pages, which none of their tokens goes to."""
    from cute_kernels import arguments
    from cute_kernels.integrations.vllm import attention

    layer = Layer("auto", "fp16", heads=4, dim=64)
    impl, metadata = layer.make("cpu"), builder().build(0, step([1, 1], [1, 1]))
    q, k, v = (torch.randn(2, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    cache, seen = torch.zeros(80, 16 * 2 * 2 * 128, dtype=torch.uint8), []
    note = lambda *_: seen.append(bool(arguments.DEBUG))  # noqa: E731
    with arguments.checking_values(), mock.patch.object(attention._LayerCall, "decode", note):
        impl.forward(SimpleNamespace(), q, k, v, cache, metadata, q)
        metadata.slot_mapping.fill_(-1)
        impl.forward(SimpleNamespace(), q, k, v, cache, metadata, q)
    assert seen == [True, False]
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def sinks_that_are_loaded_again_are_where_captured_graphs_read_them() -> None:
    impl = Layer("auto", "fp16", sinks=True).make("cpu")
    before = impl.sink_logits, impl.flash_sinks
    assert not torch.equal(before[0], torch.full((8,), 2.0))
    impl.sinks.data.fill_(2)  # vLLM loads weights where they were
    impl.process_weights_after_loading(torch.float16)
    for was, now in zip(before, (impl.sink_logits, impl.flash_sinks), strict=True):
        assert was is now and torch.equal(now.float(), torch.full((8,), 2.0))
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def two_gpus_attend_as_one_does() -> None:
    """Each to its own heads: what one GPU gives for them, but for sums that a CPU adds in another order."""
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    for kv, form in (("fp8", ""), ("auto", "int4_g4"), ("int8_per_token_head", "")):
        whole, _ = serve_steps(Layer(kv, form, heads=4, kv_heads=2, dim=64))
        parts = [serve_steps(Layer(kv, form, heads=2, kv_heads=1, dim=64, rank=rank, ranks=2))[0] for rank in range(2)]
        error = float((torch.cat(parts, dim=1).double() - whole.double()).abs().max())
        assert error < 2e-3, (kv, form, error)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def a_calibrated_cache_is_read_as_it_is_written() -> None:
    """Every part of a step goes through the layer's own transform: decoding, first chunks, continued prompts."""
    with tempfile.TemporaryDirectory() as folder:
        path = constants_file(folder)
        small: dict[str, Any] = {"constants": path}
        one_sm = {"num_sms": 1}
        for layer, bound in (
            (Layer("auto", "fp16", window=24, sinks=True, speculative=3, **small), 0.03),
            (Layer("auto", "fp16", soft_cap=3.0, pages=8, constants=constants_file(folder, k_center=None)), 0.03),
            (Layer("auto", "fp16", caches={"extend": False}, **small), 0.03),
            (Layer("auto", "int8_token_head,int4_g4", caches=one_sm, **small), 0.5),
            (Layer("auto", "int8_token_head,int4_g4", caches={"extend": False}, **small), 0.5),
        ):
            assert layer.make("cpu").transform.key != "none"
            given, expected = serve_steps(layer)
            error = float((given.double() - expected).abs().max())
            assert error < bound, (str(layer), error)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check_once
def every_kernel_of_a_step_is_listed() -> None:
    """One that is not would be compiled in a step that a user waits for, or be missed there."""
    from vllm.v1.attention.backends import fa_utils

    from cute_kernels.integrations import attention_kernels

    one_sm = {"num_sms": 1}  # then hardly anything goes in parts
    no_extend: dict[str, Any] = {"caches": {"extend": False}}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(
            fa_utils,
            "flash_attn_varlen_func",
            lambda **given: (given["out"].zero_(), given["out"][..., 0].T),
            create=True,
        ),
        mock.patch.object(fa_utils, "get_flash_attn_version", lambda **_: 3),
    ):
        centred, plain = constants_file(folder), constants_file(folder, k_center=None)
        for layer in (
            Layer("auto", "fp16", window=24, sinks=True, speculative=3),
            Layer("auto", "int4_g4", soft_cap=3.0, caches=one_sm),
            Layer("auto", "int4_g4", caches=one_sm, fused=False),
            Layer("auto", "fp16,int4_g4", caches=one_sm),
            Layer("auto", "fp16,int4_g4", caches={"extend": False}),  # as many new tokens go
            Layer("auto", "int8_token_head,fp16", speculative=3),
            Layer("fp8", caches=one_sm, heads=32, kv_heads=8),
            Layer("fp8", speculative=3, caches={"invariant": True}),
            Layer("int4_per_token_head", speculative=3),
            Layer("int4_per_token_head", window=24, sinks=True, soft_cap=3.0, caches=one_sm),
            Layer("fp8", window=24, shared=True),
            Layer("auto", "int4_g4", speculative=20),
            Layer("int4_per_token_head", dim=256),  # more columns than a kernel turns back
            Layer("auto", "fp16", window=24, sinks=True, speculative=3, constants=centred),
            Layer("auto", "fp16", sinks=True, caches=one_sm, constants=centred),
            Layer("auto", "fp16", soft_cap=3.0, constants=plain),
            Layer("auto", "int8_token_head,int4_g4", constants=centred),
            Layer("auto", "fp16,int4_g4", constants=centred),
            Layer("auto", "int4_g4", **no_extend),
            Layer("auto", "int8_token_head,int4_g4", constants=centred, **no_extend),
        ):
            impl = layer.make("cpu")
            assert attention_kernels.can_extend(impl.formats, layer.dim), str(layer)
            extends = layer.caches.get("extend", True) or not attention_kernels.is_unpacked(impl.formats, layer.dim)
            with recording() as recorded:
                serve_steps(layer)
            longest, invariant = layer.pages * layer.page, layer.caches.get("invariant", False)
            decodes = attention_kernels.Decodes(
                (1, 2, 3, 4), min(1 + layer.speculative, 16), longest, layer.page, torch.float16, invariant
            )
            with mock.patch.object(attention_kernels, "can_extend", lambda *_, extends=extends: extends):
                listed = attention_kernels.specs_of(impl, decodes, 132)
            missing = {spec.symbol for spec, _ in recorded.loaded if spec not in listed}
            assert recorded.loaded and not missing, (str(layer), sorted(missing))


@check
def queries_are_read_where_a_fused_projection_has_them() -> None:
    """Whatever serves a step, nothing is launched beside this package's kernels and FlashAttention: no copy is."""
    from vllm.v1.attention.backends import fa_utils

    from cute_kernels.integrations.vllm import attention

    one_sm = {"num_sms": 1}  # then hardly anything goes in parts
    with (
        mock.patch.object(fa_utils, "flash_attn_varlen_func", lambda **given: (None, given["out"]), create=True),
        mock.patch.object(fa_utils, "get_flash_attn_version", lambda **_: 3),
    ):
        for layer in (
            Layer("auto", "fp16", speculative=3),
            Layer("auto", "int4_g4", caches=one_sm),
            Layer("auto", "fp16,int4_g4", caches=one_sm),
            Layer("int8_per_token_head", caches=one_sm, window=24, sinks=True),
            Layer("fp8", speculative=3, caches={"invariant": True}),
        ):
            with recording():
                noted = torch_launches(layer)
            assert not noted, (str(layer), noted)
        with recording(), mock.patch.object(attention, "rows_of", lambda queries: queries.contiguous()):
            assert "aten::clone" in torch_launches(layer)


@check
def queries_that_kernels_cannot_read_where_they_lie_are_copied() -> None:
    from cute_kernels.integrations.vllm import attention

    rows = torch.randn(5, 3 * 64)
    heads = rows.unflatten(1, (3, 64))
    for part, copied in (
        (heads, False),
        (heads[:, :2], False),
        (heads[:, 1:], False),
        (rows[:, 2:130].unflatten(1, (2, 64)), True),
        (heads[:, ::2], True),
    ):
        taken = attention.rows_of(part)
        assert torch.equal(taken, part) and (taken is not part) == copied


def torch_launches(layer: Layer) -> list[str]:
    """Operations of torch that launch kernels in a layer's part of steps like some before them."""
    noted: list[str] = []

    def call(step: Any) -> None:
        step()  # makes plans
        with TorchLaunches() as mode:
            step()
        noted.extend(mode.names)

    serve_steps(layer, call=call)
    return noted


@check
def a_page_is_shared_in_the_step_that_fills_it() -> None:
    """Whatever stands where: a decoding request, a prompt that goes on, and behind them the one they begin like."""
    from vllm.v1.attention.backends import fa_utils

    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_flash_attn_version = lambda **_: 3
    different: tuple[dict[str, Any], ...] = ({}, {"num_sms": 1}, {"extend": False}, {"invariant": True})
    for caches in different:
        given, expected = serve_shared(Layer("auto", "fp16", heads=4, kv_heads=2, dim=64, caches=caches))
        error = float((given.double() - expected).abs().max())
        assert error < 2e-3, (caches, error)
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "int4_g4"


@check
def requests_without_new_tokens_are_passed_over() -> None:
    metadata = builder().build(0, step([1, 20, 0], [9, 20, 0]))
    assert metadata.num_decodes == 1 and len(metadata.pieces) == 1
    assert metadata.pieces[0].tokens == slice(1, 21)
