"""The numbers of output dtypes in launches: the argument ``out_kind`` of every product."""

BF16, FP16, FP32 = range(3)
