"""Pallas kernels for CUDA; none yet."""
