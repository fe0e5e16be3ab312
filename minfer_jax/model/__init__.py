"""The model as a pure function."""
