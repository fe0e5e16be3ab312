"""Pallas kernels for CUDA: one file a kernel, each beside its plain XLA twin."""
