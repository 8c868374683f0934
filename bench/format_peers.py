"""Other libraries' products of 16-bit activations with weights in the formats of `bench.by_format`, as data.

Each peer is given the codes and scales of the packed weight itself, so all results are held to one reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from bench import linear_peers
from bench.linear_peers import Product, Weights, in_fragments, marlin_call, marlin_codes, vllm_missing
from bench.why_not import module_missing, short
from cute_kernels.formats.weights.base import without_row_scales
from cute_kernels.gemm import PackedWeight
from cute_kernels.gemm.weight import rows_of

E4M3_TO_BF16, E2M1_TO_BF16 = 120, 126  # of exponents, what Marlin's decoders leave to the scales
NVFP4_SCALES_TO_HALF = 7  # of which, for E4M3 scales that are read as E5M3
THREADS = 16


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] as checkpoints have it.

    rows: uint8 [N, K], a code each. scales [N, groups of K]: bf16, bytes or fp32. of_rows: fp32 [N] of NVFP4, or None.
    """

    rows: torch.Tensor
    scales: torch.Tensor
    bits: int
    of_rows: torch.Tensor | None = None

    @staticmethod
    def of(weight: PackedWeight) -> Codes:
        """Those of a packed weight without padding, zero points or a permutation."""
        n, k = weight.shape
        scales, of_rows = without_row_scales(weight.format, rows_of(weight.scales))
        if scales.dtype == torch.int32:
            scales = scales.contiguous().view(torch.float32)
        rows = weight.unpack_tiles(0, weight.codes.shape[0])[:n, :k].contiguous()
        return Codes(rows, scales[:n].contiguous(), weight.format.bits, None if of_rows is None else of_rows[:n])

    @property
    def nibbles(self) -> torch.Tensor:
        """uint8 [N, K / 2] of 4-bit codes, the even input in the lower half."""
        return (self.rows[:, 0::2] | (self.rows[:, 1::2] << 4)).contiguous()

    @property
    def weights(self) -> Weights:
        """The same, as `bench.linear_peers` has it."""
        return Weights(self.rows, self.scales, self.bits)

    @property
    def tensor_scale(self) -> float:
        """The scale that all rows have in common."""
        assert self.of_rows is not None
        return float(self.of_rows[0])


@dataclass(frozen=True)
class FormatPeer:
    """`missing` says why the peer is not here (None: it is); `prepare` packs a weight once, by the format's name.

    compiles: whether calls compile kernels by themselves, in processes of their own: then side by side, before any is
    timed.
    """

    name: str
    missing: Callable[[], str | None]
    prepare: Mapping[str, Callable[[Codes], Product]]
    compiles: bool = False


@dataclass
class Peers:
    """The products of the peers that are here for a weight in several formats, and why others are not."""

    products: dict[tuple[str, str], Product] = field(default_factory=dict)  # by format and peer
    why_not: dict[tuple[str, str], str] = field(default_factory=dict)

    @staticmethod
    def of(weights: Mapping[str, PackedWeight], xs: Iterable[torch.Tensor], peers: Iterable[FormatPeer]) -> Peers:
        """xs: activations that products will be called with."""
        found, xs = Peers(), tuple(xs)
        calls: list[functools.partial[torch.Tensor]] = []
        peers = tuple(peers)
        for form, weight in weights.items():
            codes = Codes.of(weight)
            for peer in peers:
                if form not in peer.prepare:
                    continue
                key = form, peer.name
                reason = peer.missing()
                try:
                    if reason is None:
                        found.products[key] = peer.prepare[form](codes)
                        calls += [functools.partial(found.products[key], x) for x in xs if peer.compiles]
                except Exception as error:  # one peer's failure must not lose the others' results
                    reason = short(error)
                if reason is not None:
                    found.why_not[key] = reason
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_tried, calls))
        return found

    def add_cublas(self, dense: torch.Tensor) -> None:
        """Adds torch's product with a bf16 weight [N, K], which is no other format's and is held to nothing."""
        self.products["bf16", "cuBLAS"] = lambda x: torch.matmul(x, dense.T)


def _tried(call: Callable[[], object]) -> None:
    """One that fails says why when it is checked."""
    try:
        call()
    except Exception:
        return


# -- Marlin, from vLLM's build -----------------------------------------------------------------------------------------


def _marlin(codes: Codes, kind: str, scales: torch.Tensor, **more: torch.Tensor) -> Product:
    types = importlib.import_module("vllm.scalar_type").scalar_types
    return marlin_call(marlin_codes(codes.weights), scales, getattr(types, kind).id, codes.rows.shape, **more)


def _four_in_turn(scales: torch.Tensor) -> torch.Tensor:
    """The order of scales of one byte, of which its decoder takes every other one."""
    return scales.view(-1, 4)[:, [0, 2, 1, 3]].reshape(scales.shape).contiguous()


def _marlin_mxfp4(codes: Codes) -> Product:
    return _marlin(codes, "float4_e2m1f", _four_in_turn(in_fragments(codes.scales)).view(torch.float8_e8m0fnu))


def _marlin_nvfp4(codes: Codes) -> Product:
    """A scale's upper byte as fp16, times 2**7 and without its sign, which is 0."""
    halves = _four_in_turn(in_fragments(codes.scales.view(torch.float8_e4m3fn).half()))
    words = (halves * 2.0**NVFP4_SCALES_TO_HALF).view(torch.int16) << 1
    scales = words.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    scale = codes.tensor_scale * 2.0 ** (E2M1_TO_BF16 - NVFP4_SCALES_TO_HALF)
    x = torch.zeros((1, codes.rows.shape[1]), dtype=torch.bfloat16, device=scales.device)
    for dtype in (torch.float32, torch.bfloat16):  # newer releases want the former, and say so
        factor = torch.tensor([scale], dtype=dtype, device=scales.device)
        product = _marlin(codes, "float4_e2m1f", scales, global_scale=factor)
        with contextlib.suppress(RuntimeError):
            product(x)
            break
    return product


def _marlin_fp8(codes: Codes) -> Product:
    scales = in_fragments(codes.scales.bfloat16(), of_rows=codes.scales.shape[1] == 1)
    return _marlin(codes, "float8_e4m3fn", scales * 2.0**E4M3_TO_BF16)


# -- QuACK -------------------------------------------------------------------------------------------------------------


def _quack(codes: Codes, form: str) -> Product:
    quack = importlib.import_module("quack.gemm_w4")
    blob, scales = quack.prepare_w4_weight(codes.nibbles, codes.scales, form)
    scale = 1.0 if codes.of_rows is None else codes.tensor_scale
    return lambda x: quack.gemm_w4a16(x, blob, scales, tensor_scale=scale, wformat=form)


def _quack_fp8(codes: Codes) -> Product:
    module = importlib.import_module("bench.quack_by_row")  # which imports QuACK
    return module.prepare(codes.rows.view(torch.int8), codes.scales[:, 0], "fp8")


# -- Humming -----------------------------------------------------------------------------------------------------------


def _humming(codes: Codes, dtype: torch.dtype | None = None, **form: object) -> Product:
    """dtype: of scales, if not bf16. form: as `HummingLayer` has it."""
    humming = importlib.import_module("humming.layer")
    n, k = codes.rows.shape
    packed = codes.nibbles if codes.bits == 4 else codes.rows
    tensors = {"weight": packed.view(torch.int32), "weight_scale": codes.scales.bfloat16()}
    if dtype is not None:
        tensors["weight_scale"] = codes.scales.view(dtype)
    if codes.of_rows is not None:
        tensors["weight_scale_2"] = codes.of_rows[:1].float()
    layer = humming.HummingLayer(n, k, dict(form), torch_dtype=torch.bfloat16).to(codes.rows.device)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


PEERS = (
    FormatPeer(
        "Marlin",
        vllm_missing,
        {
            "w4g128": lambda codes: _marlin(codes, "uint4b8", in_fragments(codes.scales)),
            "mxfp4": _marlin_mxfp4,
            "nvfp4": _marlin_nvfp4,
            "fp8": _marlin_fp8,
            "fp8_block": _marlin_fp8,
        },
    ),
    FormatPeer("Machete", vllm_missing, {"w4g128": lambda codes: linear_peers.machete(codes.weights)}),
    FormatPeer(
        "QuACK",
        linear_peers.quack_missing,
        {
            "w4g128": functools.partial(_quack, form="int4"),
            "mxfp4": functools.partial(_quack, form="mxfp4"),
            "nvfp4": functools.partial(_quack, form="nvfp4"),
            "fp8": _quack_fp8,
        },
    ),
    FormatPeer(
        "Humming",
        module_missing("humming.layer"),
        {
            "w4g128": functools.partial(_humming, b_dtype="uint4", weight_scale_group_size=128),
            "mxfp4": functools.partial(
                _humming,
                dtype=torch.float8_e8m0fnu,
                b_dtype="float4e2m1",
                bs_dtype="float8e8m0",
                weight_scale_group_size=32,
            ),
            "nvfp4": functools.partial(
                _humming,
                dtype=torch.float8_e4m3fn,
                b_dtype="float4e2m1",
                bs_dtype="float8e4m3",
                weight_scale_group_size=16,
                weight_scale_2_type="tensor",
            ),
            "fp8": functools.partial(_humming, b_dtype="float8e4m3"),
            "fp8_block": functools.partial(_humming, b_dtype="float8e4m3", weight_scale_group_size=128),
        },
        compiles=True,
    ),
)
