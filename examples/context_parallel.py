"""Context parallelism: each rank holds a part of every request's tokens, and the parts' attention is merged.

python examples/context_parallel.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from cute_kernels import append_and_decode, decode_attention, merge_over_ranks, quantize_kv

RANKS, BATCH, TOKENS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 3, 200, 8, 2, 128
K_FORMAT, V_FORMAT = "int8_token_head", "int4_g4"


def attend(rank: int, rendezvous: str) -> None:
    """A step of decoding by one rank; rank 0 compares it with the whole context on one device."""
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # the same numbers in all processes, of which each keeps its part
    heads = (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    q, new_k, new_v = (torch.randn(BATCH, 1, h, HEAD_DIM).bfloat16().to(device) for h in heads)
    k, v = (torch.randn(BATCH, TOKENS, NUM_KV_HEADS, HEAD_DIM).bfloat16().to(device) for _ in range(2))
    k[:, -1:], v[:, -1:] = new_k, new_v
    k_cache, v_cache = quantize_kv(k, kv_format=K_FORMAT), quantize_kv(v, kv_format=V_FORMAT)

    share = TOKENS // RANKS
    own_k, own_v = (cache[:, rank * share : (rank + 1) * share].contiguous() for cache in (k_cache, v_cache))
    lengths = torch.full((BATCH,), share, dtype=torch.int32, device=device)
    if rank == RANKS - 1:  # the newest token's place is here
        state = append_and_decode(
            q, new_k, new_v, own_k, own_v, lengths, kv_format=(K_FORMAT, V_FORMAT), return_lse=True
        )
    else:
        state = decode_attention(q, own_k, own_v, lengths, kv_format=(K_FORMAT, V_FORMAT), return_lse=True)
    out, lse = merge_over_ranks(*state)  # the same bits on every rank

    whole = decode_attention(q, k_cache, v_cache, lengths * RANKS, kv_format=(K_FORMAT, V_FORMAT), return_lse=True)
    assert isinstance(whole, tuple)
    off = [(mine.float() - all_of_it.float()).abs().max() for mine, all_of_it in zip((out, lse), whole, strict=True)]
    if rank == 0:
        differences = f"out {off[0]:.4f}, log-sum-exp {off[1]:.6f}"
        print(f"{RANKS} ranks with {share} tokens each: {differences} away from one device's result")
    assert off[0] < 2**-6 and off[1] < 1e-4
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(attend, (f"{folder}/rendezvous",), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
