"""The weight blob of the Hopper weight-only GEMM. One load of 16 bytes gives a thread its wgmma operands of several k
steps.

The GEMM computes out^T = W X^T with the weights as the A operand of wgmma, in registers. The blob is cut into tiles of
64 output features (wgmma's M) by 64 (4-bit) or 32 (8-bit) inputs; A tile has 16 bytes for each of 128 threads. So a
warp reads 512 contiguous bytes, and one bulk copy of 2048 bytes copies a whole tile. The 16 bytes of a thread are the A
fragments of 4 (4-bit) or 2 (8-bit) consecutive k16 steps, The codes of each 32-bit register are stored in such an order
that the fast conversion returns them in order (`layouts.decode`). So the kernel need not reorder them.

The layout is composed from the wgmma fragment, the conversion's register order and the tile order. So it needs no
tables, and is proved by the proofs of these parts.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from layouts.algebra import Layout, as_modes, compose, from_modes
from layouts.bitlinear import BitMap, bits_of
from layouts.decode import CONVERSIONS
from layouts.fragments import wgmma_a
from layouts.proofs import Proof, prove
from layouts.transform import Transform

TILE_N = 64
TILE_BYTES = 2048
LOAD_BYTES = 16
THREAD_BITS = 7
STEP_K = 16
CODE_BITS = (4, 8)  # of codes that tiles hold
DEFAULT_CONVERSION = {4: "u4_bf16", 8: "u8_bf16"}


def steps_per_load(bits: int) -> int:
    """Returns the number of consecutive k16 steps whose A fragments one 16-byte load holds: 4 for 4-bit codes, 2 for
    8-bit codes.
    """
    _check_bits(bits)
    return 8 * LOAD_BYTES // (bits * wgmma_a(16).num_values)


@lru_cache(maxsize=16)  # every launch asks for it, and composing the fragment takes tens of microseconds
def tile_k(bits: int) -> int:
    """Returns the number of inputs of a tile: 64 for 4-bit codes, 32 for 8-bit codes."""
    return STEP_K * steps_per_load(bits)


@lru_cache(maxsize=256)
def transform(n: int, k: int, bits: int, conversion: str | None = None) -> Transform:
    """Returns the transform from row-major codes [n, k] to the blob [n / 64, k / tile_k, elements of a tile].

    Args:
        n: output features, a multiple of 64.
        k: inputs, a multiple of `tile_k`.
        bits: 4 or 8.
        conversion: the name, in `layouts.decode.CONVERSIONS`, of the conversion that decides the order of codes in a
            register; by default the biased bf16 conversion. Codes are moved, not changed.

    Raises:
        ValueError: n or k is no multiple of the tile, or the conversion does not take codes of that width.
    """
    name = _conversion(bits, conversion)
    for label, extent, multiple in (("N", n, TILE_N), ("K", k, tile_k(bits))):
        if extent < 1 or extent % multiple:
            raise ValueError(f"{label} is {extent}; want a positive multiple of {multiple} for {bits}-bit codes")
    fragment = wgmma_a(16)
    threads, values = fragment.modes()
    stored = _register_order(bits, name)
    in_matrix = Layout((TILE_N, STEP_K), (k, 1))
    modes = (
        *as_modes(compose(in_matrix, compose(values, stored))),
        (steps_per_load(bits), STEP_K),
        *as_modes(compose(in_matrix, threads)),
        (k // tile_k(bits), tile_k(bits)),
        (n // TILE_N, TILE_N * k),
    )
    shape = (n // TILE_N, k // tile_k(bits), TILE_N * tile_k(bits))
    return Transform.from_layout(f"hopper_{name}", from_modes(modes), bits, (n, k), shape)


def pack(q: torch.Tensor, bits: int, conversion: str | None = None) -> torch.Tensor:
    """Packs codes into the blob.

    Args:
        q: int8 or uint8 [N, K], or 4-bit codes packed along K, [N, K/2], even k in the low nibble.
        bits: 4 or 8.
        conversion: as in `transform`.

    Returns:
        [N / 64, K / tile_k, 2048] of q's dtype, on q's device.

    Raises:
        TypeError: q is not int8 or uint8.
        ValueError: q is not 2-D, or is not made of whole tiles.
    """
    if not isinstance(q, torch.Tensor) or q.dtype not in (torch.int8, torch.uint8):
        found = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise TypeError(f"q is {found}; want an int8 or uint8 tensor")
    if q.ndim != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; want [N, K{'/2' if bits == 4 else ''}]")
    _check_bits(bits)
    return transform(q.shape[0], q.shape[1] * 8 // bits, bits, conversion)(q)


def restore(blob: torch.Tensor, bits: int, conversion: str | None = None) -> torch.Tensor:
    """Undoes `pack`: returns the codes, [N, K] or [N, K/2].

    Raises:
        ValueError: the blob is not [N / 64, K / tile_k, 2048].
    """
    _check_blob(blob)
    n, k = blob.shape[0] * TILE_N, blob.shape[1] * tile_k(bits)
    return transform(n, k, bits, conversion).inverse()(blob)


def shard_n(blob: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Returns a view of the blob with the output features of one rank (column-parallel). The view equals the blob of
    the rank's rows alone.

    Raises:
        ValueError: the blob's N tiles do not split evenly, or rank is out of range.
    """
    return _shard(blob, 0, "N", rank, world_size)


def shard_k(blob: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Returns a view of the blob with the inputs of one rank (row-parallel). The view equals the blob of the rank's
    columns alone. Errors are those of `shard_n`."""
    return _shard(blob, 1, "K", rank, world_size)


def prove_thread_load(bits: int, conversion: str | None = None) -> Proof:
    """Proves that a thread's 16 bytes, after the conversion, are its A fragments of consecutive k steps.

    Raises:
        ProofError: the claim is not true.
    """
    name = _conversion(bits, conversion)
    blob = transform(TILE_N, tile_k(bits), bits, name).bit_map()
    fragment = wgmma_a(16).bit_map()
    step_bits, value_bits = bits_of(steps_per_load(bits)), bits_of(wgmma_a(16).num_values)
    # (converted value, step, thread) -> blob index -> row-major index m * tile_k + k.
    decoded = _register_map(bits, name).inverse().stacked(BitMap.identity(step_bits + THREAD_BITS))
    got = blob @ decoded
    # (value, step, thread) -> m + 64 * k of the fragment, then to row-major.
    k_bits = bits_of(tile_k(bits))
    columns = fragment.columns
    steps = tuple(1 << fragment.out_bits + i for i in range(step_bits))
    wanted = BitMap((*columns[THREAD_BITS:], *steps, *columns[:THREAD_BITS]), fragment.out_bits + step_bits)
    row_major = BitMap.permutation([*range(k_bits, k_bits + 6), *range(k_bits)])
    claim = f"16 bytes of a thread, converted by {name}, are its A fragments of {1 << step_bits} k steps"
    return prove(got == row_major @ wanted, claim, "matrix", 1 << value_bits + step_bits + THREAD_BITS)


def _register_order(bits: int, conversion: str) -> Layout:
    """Returns the order in which a thread's codes of one k step are stored, as the layout from a code's position to the
    code's index in the fragment.
    """
    order = as_modes(CONVERSIONS[conversion].register_layout())
    registers = wgmma_a(16).num_values * bits // 32
    return from_modes((*order, (registers, 32 // bits)))


def _register_map(bits: int, conversion: str) -> BitMap:
    return BitMap.from_layout(_register_order(bits, conversion))


def _conversion(bits: int, conversion: str | None) -> str:
    _check_bits(bits)
    name = conversion or DEFAULT_CONVERSION[bits]
    fitting = [found for found, entry in CONVERSIONS.items() if entry.bits == bits]
    if name not in fitting:
        raise ValueError(f"conversion is {name!r}; want one of {fitting} for {bits}-bit codes")
    return name


def _shard(blob: torch.Tensor, axis: int, label: str, rank: int, world_size: int) -> torch.Tensor:
    _check_blob(blob)
    tiles = blob.shape[axis]
    if world_size < 1 or tiles % world_size:
        raise ValueError(f"world_size is {world_size}; want a divisor of the {tiles} tiles along {label}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; want 0 <= rank < {world_size}")
    share = tiles // world_size
    return blob.narrow(axis, rank * share, share)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; want 4 or 8")


def _check_blob(blob: torch.Tensor) -> None:
    if blob.ndim != 3 or blob.shape[-1] != TILE_BYTES:
        raise ValueError(f"blob has shape {tuple(blob.shape)}; want [N / {TILE_N}, K / tile_k, {TILE_BYTES}]")
