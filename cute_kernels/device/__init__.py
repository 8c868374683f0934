"""Shared GPU pieces: PTX wrappers and number decoding. Imported by kernels only, but for `cuda` and `exchange`."""
