"""The integers by which launches name output dtypes: the argument ``out_kind`` of every product."""

BF16, FP16, FP32 = range(3)
