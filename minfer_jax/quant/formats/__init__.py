"""GGUF types, one file each."""
