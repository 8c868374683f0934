"""Device code that kernels share: PTX wrappers, loads, pipelines, number formats. Only `cuda` and `exchange` may be
imported by other modules than kernels."""
