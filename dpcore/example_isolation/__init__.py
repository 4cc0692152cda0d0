"""Experiments that show whether a model or a criterion mixes the examples of a batch."""
