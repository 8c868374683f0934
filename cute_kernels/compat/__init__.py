"""Other libraries' entry points, served by this package's kernels, so that code written for them runs."""
