"""A few small calls of each kind for compute-sanitizer, e.g. `compute-sanitizer python -m tests.gpu.sanitize`.

All inputs are initialised, so that initcheck reports only what the kernels leave out.
"""

import torch

import cute_kernels
from layouts.kv import Int4Row

CASES = [
    # format, head_dim, kv heads, query heads per KV head, tokens, lengths, splits
    ("int4_g1", 128, 1, 8, 600, [600, 1, 0], None),
    ("int4_g1", 128, 1, 8, 600, [600, 300, 0], 3),
    ("int4_g1", 128, 1, 8, 517, [517, 5, 0], 2),
    ("int4_g4", 128, 8, 8, 96, [96, 33, 0], 2),
    ("int4_g4", 128, 32, 1, 96, [96, 33, 0], None),
    ("int4_g1", 128, 1, 16, 300, [300, 1], None),
    ("bf16", 128, 1, 8, 600, [600, 1, 0], None),
    ("bf16", 128, 2, 8, 300, [299, 1, 0], 3),
]


def main() -> None:
    torch.manual_seed(0)
    for kv_format, head_dim, kv_heads, group, tokens, lengths, splits in CASES:
        values = [torch.randn(len(lengths), tokens, kv_heads, head_dim) for _ in range(2)]
        if kv_format == "bf16":
            k, v = (x.bfloat16().cuda() for x in values)
        else:
            k, v = (Int4Row(head_dim, int(kv_format[-1])).quantize(x).cuda() for x in values)
        q = torch.randn(len(lengths), 1, kv_heads * group, head_dim).bfloat16().cuda()
        seq_lens = torch.tensor(lengths, dtype=torch.int32).cuda()
        out = cute_kernels.decode_attention(q, k, v, seq_lens, kv_format=kv_format, num_splits=splits)
        print(kv_format, tokens, splits, bool(out.cpu().isfinite().all()), flush=True)


if __name__ == "__main__":
    main()
