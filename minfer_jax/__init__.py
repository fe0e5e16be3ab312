"""GGUF language models as pure JAX functions."""
