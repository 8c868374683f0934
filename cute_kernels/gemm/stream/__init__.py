"""The memory-bound kernel of few rows, which streams codes once and multiplies by mma.sync: `.kernel.StreamKernel`."""
