"""Checks and measures the Pallas kernels on a CUDA device, in minutes: see `__main__`.

Each part is a module with `cases`; a case gives rows. Cases run in processes of their own
(`worker`), which may die, hang or lose the device without taking more than a row with them
(`workers`). Nothing here is a part of the package.
"""
