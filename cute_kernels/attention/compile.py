"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from cute_kernels.attention.config import DecodeConfig


def compile_decode(config: DecodeConfig, arch: str, options: str = ""):
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    The result takes (q, k_cache, v_cache, seq_lens, out, lse, partial_out, partial_stats, counters, softmax_scale, num_splits,
    cluster_size, mode) as :meth:`DecodeKernel.__call__` describes them, torch tensors as they are, on torch's current stream.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.attention.kernel import DecodeKernel

    reason = config.can_implement()
    if reason is not None:
        raise ValueError(f"config: {reason} ({config})")
    float_type = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
    cache_type = float_type.get(config.kv_format, cutlass.Uint8)
    aligned = 16 if config.copy != "word" else 4

    def tensor(dtype, shape, align):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    batch, tokens, kv_heads, q_heads = (cute.sym_int() for _ in range(4))
    row = config.format.row_elements(config.head_dim)
    caches = [tensor(cache_type, (batch, tokens, kv_heads, row), aligned) for _ in range(2)]
    queries = [tensor(float_type[config.q_dtype], (batch, q_heads, config.head_dim), 16) for _ in range(2)]
    vectors = [tensor(cutlass.Float32, (cute.sym_int(),), 16) for _ in range(2)]
    kernel = DecodeKernel(config)
    return cute.compile(
        kernel,
        queries[0],
        *caches,
        tensor(cutlass.Int32, (batch,), 4),
        queries[1],
        tensor(cutlass.Float32, (cute.sym_int(), cute.sym_int()), 4),
        *vectors,
        tensor(cutlass.Int32, (cute.sym_int(),), 4),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}".strip(),
    )
