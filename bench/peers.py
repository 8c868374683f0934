"""Other libraries' decode attention, as data: for each, whether it is here, and the calls that stand for it.

A peer offers variants (layouts of the same problem, numbers of splits). Each variant's output is compared with the
reference before it is timed; the fastest that agrees speaks for the peer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.timing import Protocol, time_cold
from bench.why_not import module_missing, short
from bench.workloads import DecodeInputs

AGREEMENT = 2e-2  # relative error (norm) that a 16-bit peer must stay under to be timed
FP8_AGREEMENT = 6e-2  # of one that rounds queries and probabilities to FP8
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class Variant:
    """One way of calling a peer: `call` returns something that `output` turns into [batch, 1, num_q_heads, head_dim].

    `context` is entered around checks and timing, not around each call.
    """

    label: str
    call: Callable[[], object]
    output: Callable[[object], torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True)
class Peer:
    """`missing` says why the peer is not here (None: it is); `refuses` why it cannot run these inputs."""

    name: str
    formats: tuple[str, ...]
    missing: Callable[[], str | None]
    variants: Callable[[DecodeInputs], Iterator[Variant]]
    refuses: Callable[[DecodeInputs], str | None] = lambda inputs: None
    agreement: float = AGREEMENT


@dataclass
class PeerResult:
    """Best variant's time, or why there is none. `notes` holds what became of each variant that did not run."""

    name: str
    us: float | None = None
    label: str = ""
    why_not: str = ""
    error: float | None = None
    notes: dict[str, str] = field(default_factory=dict)


def measure_peer(
    peer: Peer,
    inputs: DecodeInputs,
    want: torch.Tensor,
    rows: torch.Tensor,
    flush: Callable[[], None],
    protocol: Protocol,
) -> PeerResult:
    """Times every variant that agrees with `want` (the reference output of the requests `rows`)."""
    result = PeerResult(peer.name)
    result.why_not = peer.missing() or peer.refuses(inputs) or ""
    if result.why_not:
        return result
    try:
        for variant in peer.variants(inputs):
            _measure_variant(variant, result, want, rows, flush, protocol, peer.agreement)
    except Exception as error:  # one peer's failure must not lose the others' results
        result.notes["setting up"] = short(error)
    if result.us is None:
        result.why_not = "; ".join(f"{label}: {note}" for label, note in result.notes.items()) or "no variant"
    return result


def _measure_variant(
    variant: Variant,
    result: PeerResult,
    want: torch.Tensor,
    rows: torch.Tensor,
    flush: Callable[[], None],
    protocol: Protocol,
    agreement: float,
) -> None:
    try:
        with variant.context():
            error = relative_error(variant.output(variant.call())[rows], want)
            if not error <= agreement:
                result.notes[variant.label] = f"disagrees with the reference: relative error {error:.2e}"
                return
            us = time_cold(variant.call, flush, protocol).median_us
            if result.us is None or us < result.us:
                result.us, result.label, result.error = us, variant.label, error
    except Exception as failure:
        result.notes[variant.label] = short(failure)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`; NaN in `got` gives NaN."""
    return float((got.to(want.dtype) - want).norm() / want.norm())


def kernels_of(peer: Peer, inputs: DecodeInputs) -> dict[str, list[str]]:
    """GPU kernel names that each variant launches: evidence of which implementation ran.

    Call it after all timing: a profiler, once started, may slow later launches. Empty where profiling is not allowed.
    """
    if peer.missing() or peer.refuses(inputs):
        return {}
    names = {}
    for variant in peer.variants(inputs):
        with contextlib.suppress(Exception), variant.context():
            names[variant.label] = _kernel_names(variant.call)
    return names


def _kernel_names(call: Callable[[], object]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sorted({event.key[:120] for event in profiler.key_averages() if not event.key.startswith("cuda")})


# -- torch SDPA -----------------------------------------------------------------------------------------------------

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _in_pages(inputs: DecodeInputs) -> str | None:
    return "takes contiguous caches alone" if "block_table" in inputs.options else None


def _sdpa_variants(backend: str) -> Callable[[DecodeInputs], Iterator[Variant]]:
    """One backend, which is the only one allowed, so SDPA raises where it cannot run instead of taking another."""

    def variants(inputs: DecodeInputs) -> Iterator[Variant]:
        shape = inputs.shape
        group = shape.num_q_heads // shape.num_kv_heads
        k, v = inputs.k_cache.transpose(1, 2), inputs.v_cache.transpose(1, 2)
        packed = inputs.q.view(shape.batch, shape.num_kv_heads, group, shape.head_dim)
        heads = inputs.q.transpose(1, 2)

        def context() -> contextlib.AbstractContextManager[object]:
            return sdpa_kernel([_BACKENDS[backend]])

        def sdpa(q: torch.Tensor, enable_gqa: bool = False) -> Callable[[], object]:
            return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

        # With no mask, the query heads of one KV head are as good as so many query tokens: no GQA support needed.
        yield Variant("heads as tokens", sdpa(packed), lambda out: _tensor(out).reshape(inputs.q.shape), context)
        if group > 1:
            gqa = sdpa(heads, enable_gqa=True)
            yield Variant("enable_gqa", gqa, lambda out: _tensor(out).transpose(1, 2), context)

    return variants


def _tensor(value: object) -> torch.Tensor:
    while isinstance(value, (tuple, list)):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value


# -- FlashAttention-3, from vLLM's build ------------------------------------------------------------------------------


def _fa3_library() -> Path | None:
    """vLLM's FA3 extension: unpacked under $PEERS_DIR, or in an installed vllm (found without importing it)."""
    roots = [Path(os.environ["PEERS_DIR"]) / "vllm"] if "PEERS_DIR" in os.environ else []
    spec = importlib.util.find_spec("vllm")
    roots += [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [path for root in roots for path in sorted(root.glob("vllm_flash_attn/_vllm_fa3_C*.so"))]
    return found[0] if found else None


def fa3_missing() -> str | None:
    library = _fa3_library()
    if library is None:
        return "not installed: no vllm package, and no vllm/vllm_flash_attn/_vllm_fa3_C*.so under $PEERS_DIR"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"not loadable: {short(error)}"
    return None


def _fa3_variants(inputs: DecodeInputs) -> Iterator[Variant]:
    op = torch.ops._vllm_fa3_C.fwd
    arguments = op.default._schema.arguments
    shape = inputs.shape
    common: dict[str, object] = {
        "q": inputs.q,
        "k": inputs.k_cache,
        "v": inputs.v_cache,
        **_fa3_in_fp8(inputs),
        "max_seqlen_q": 1,
        "max_seqlen_k": shape.seq_len,
        "softmax_scale": shape.head_dim**-0.5,
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # its own heuristic
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }

    def bound(**extra: object) -> Callable[[], object]:
        # By name: the schema grew over releases; what is not named here is optional and stays None.
        values = common | extra
        ordered = [values.get(argument.name) for argument in arguments]
        return lambda: op(*ordered)

    if "block_table" in inputs.options:
        table = inputs.options["block_table"].clamp(min=0)
        yield Variant("pages", bound(seqused_k=inputs.seq_lens, page_table=table), _tensor)
        return
    yield Variant("seqused_k", bound(seqused_k=inputs.seq_lens), _tensor)
    yield Variant("dense", bound(), _tensor)  # every request has the whole cache: no lengths needed


def _fa3_in_fp8(inputs: DecodeInputs) -> dict[str, object]:
    """What differs over an FP8 cache: queries are in E4M3 before the call."""
    if inputs.kv_format != "e4m3_tensor":
        return {}
    size = (inputs.shape.batch, inputs.shape.num_kv_heads)
    scale, unit = (torch.full(size, x, device=inputs.q.device) for x in (float(inputs.options["k_scale"]), 1.0))
    codes = {name: getattr(inputs, f"{name}_cache").view(torch.float8_e4m3fn) for name in ("k", "v")}
    descales = {"q_descale": unit, "k_descale": scale, "v_descale": scale}
    return {"q": inputs.q.to(torch.float8_e4m3fn), **codes, **descales}


# -- FlashInfer --------------------------------------------------------------------------------------------------------


def _flashinfer_variants(inputs: DecodeInputs, page_size: int = 64) -> Iterator[Variant]:
    flashinfer = importlib.import_module("flashinfer")
    shape, device = inputs.shape, inputs.q.device
    counts = [-(-length // page_size) for length in shape.lengths]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    last = torch.tensor(shape.lengths, dtype=torch.int32, device=device).sub_(1).remainder_(page_size).add_(1)
    if "block_table" in inputs.options:
        table = inputs.options["block_table"]
        pages = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    else:
        pages = torch.arange(sum(counts), dtype=torch.int32, device=device)
    dtype = torch.float8_e4m3fn if inputs.kv_format == "e4m3_tensor" else inputs.k_cache.dtype
    size = (-1, page_size, shape.num_kv_heads, shape.head_dim)
    caches = tuple(cache.view(dtype).view(size) for cache in (inputs.k_cache, inputs.v_cache))
    scales = {name: float(inputs.options[name]) for name in ("k_scale", "v_scale") if name in inputs.options}
    q = inputs.q.squeeze(1)
    for tensor_cores in (True, False):
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(
            indptr,
            pages,
            last,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            page_size,
            q_data_type=q.dtype,
            kv_data_type=dtype,
        )

        def call(wrapper: object = wrapper) -> object:
            return wrapper.run(q, caches, **scales)  # type: ignore[attr-defined]

        label = "tensor cores" if tensor_cores else "CUDA cores"
        yield Variant(label, call, lambda out: _tensor(out).unsqueeze(1))


def _xqa_variants(inputs: DecodeInputs, page_size: int = 64) -> Iterator[Variant]:
    """The kernel that FlashInfer's `trtllm_batch_decode_with_kv_cache` chooses on Hopper. It plans nothing."""
    decode = importlib.import_module("flashinfer").decode
    shape, device = inputs.shape, inputs.q.device
    if "block_table" in inputs.options:
        table = inputs.options["block_table"].clamp(min=0)
    else:
        pages = shape.batch * (shape.seq_len // page_size)
        table = torch.arange(pages, dtype=torch.int32, device=device).view(shape.batch, -1)
    dtype = torch.float8_e4m3fn if inputs.kv_format == "e4m3_tensor" else inputs.k_cache.dtype
    size = (-1, page_size, shape.num_kv_heads, shape.head_dim)
    caches = tuple(cache.view(dtype).view(size) for cache in (inputs.k_cache, inputs.v_cache))
    k_scale, v_scale = (float(inputs.options.get(name, 1.0)) for name in ("k_scale", "v_scale"))
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)  # the kernel's semaphores start at 0
    q = inputs.q.squeeze(1)

    def call() -> object:
        return decode.xqa_batch_decode_with_kv_cache(
            q,
            caches,
            workspace,
            table,
            inputs.seq_lens,
            shape.seq_len,
            bmm1_scale=k_scale * shape.head_dim**-0.5,
            bmm2_scale=v_scale,
        )

    yield Variant("XQA", call, lambda out: _tensor(out).unsqueeze(1))


# -- FBGEMM ------------------------------------------------------------------------------------------------------------


def _fbgemm_refuses(inputs: DecodeInputs) -> str | None:
    shape = inputs.shape
    if "block_table" in inputs.options:
        return _in_pages(inputs)
    if shape.num_kv_heads != 1 or shape.head_dim != 128 or shape.seq_len > 16384:
        return "supports one KV head, head_dim 128 and at most 16384 tokens"
    return None


def _fbgemm_variants(inputs: DecodeInputs) -> Iterator[Variant]:
    op = torch.ops.fbgemm.gqa_attn_splitk
    positions = inputs.seq_lens - 1
    groups = int(inputs.kv_format[6:]) if inputs.kv_format.startswith("int4") else 1
    scale = inputs.shape.head_dim**-0.5
    for splits in SPLITS:

        def call(splits: int = splits) -> object:
            return op(inputs.q, inputs.k_cache, inputs.v_cache, positions, scale, splits, groups)

        yield Variant(f"{splits} splits", call, _tensor)


PEERS = (
    *(
        Peer(f"SDPA {name}", ("bf16", "fp16"), lambda: None, _sdpa_variants(name), _in_pages)
        for name in ("cudnn", "flash", "efficient")
    ),
    Peer("FlashAttention-3", ("bf16", "fp16"), fa3_missing, _fa3_variants),
    Peer("FlashAttention-3 in FP8", ("e4m3_tensor",), fa3_missing, _fa3_variants, _in_pages, agreement=FP8_AGREEMENT),
    Peer("FlashInfer", ("bf16", "fp16", "e4m3_tensor"), module_missing("flashinfer"), _flashinfer_variants),
    Peer("FlashInfer XQA", ("bf16", "fp16"), module_missing("flashinfer"), _xqa_variants),
    Peer(
        "FlashInfer XQA in FP8", ("e4m3_tensor",), module_missing("flashinfer"), _xqa_variants, agreement=FP8_AGREEMENT
    ),
    Peer(
        "FBGEMM",
        ("bf16", "int4_g1", "int4_g4"),
        module_missing("fbgemm_gpu.experimental.gen_ai"),
        _fbgemm_variants,
        _fbgemm_refuses,
    ),
)
