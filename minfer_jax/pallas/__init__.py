"""Pallas kernels for CUDA, one file each; `quant/matmul.py` and `model/attention.py` choose them.

Each file has a frozen Config of block sizes, `supports`, which says None or why not, and a plain
XLA twin that it names. `blocks` finds the sizes.
"""
