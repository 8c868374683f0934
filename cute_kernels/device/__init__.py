"""Shared GPU pieces: PTX wrappers and number decoding. Imported by kernels only."""
