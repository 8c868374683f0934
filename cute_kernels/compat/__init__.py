"""Entry points with other libraries' names and arguments on this package's kernels, so that code for those libraries
runs."""
