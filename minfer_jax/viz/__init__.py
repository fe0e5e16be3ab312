"""A local web page that shows a model at work: `python -m minfer_jax.viz`.

Its routes and events are minfer's, with some more in them; see `routes` and `live`.
"""
