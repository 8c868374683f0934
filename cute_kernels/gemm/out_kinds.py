"""What a launch says the dtype of its output by: the argument ``out_kind`` of every product."""

BF16, FP16, FP32 = range(3)
