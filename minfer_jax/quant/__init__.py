"""Quantised weights and their product."""
