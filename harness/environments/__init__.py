"""Environments in which workers run: virtual environments, containers, or a Python that is used as it is."""
