"""Device code that kernels share: PTX wrappers, loads, pipelines, number formats. Modules that are not kernels may
import only `cuda` and `exchange`."""
