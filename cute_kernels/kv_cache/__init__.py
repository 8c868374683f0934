"""The KV cache: pages and sequences, calibration of scales, smoothing of K."""

from cute_kernels.kv_cache.batch import Batch
from cute_kernels.kv_cache.cache import KVCache
from cute_kernels.kv_cache.calibration import Calibrator, compute_kv_scale
from cute_kernels.kv_cache.memory import MemoryReport
from cute_kernels.kv_cache.pages import OutOfPagesError
from cute_kernels.kv_cache.smoothing import check_pairs, fold, smooth_keys

__all__ = [
    "Batch",
    "Calibrator",
    "KVCache",
    "MemoryReport",
    "OutOfPagesError",
    "check_pairs",
    "compute_kv_scale",
    "fold",
    "smooth_keys",
]
