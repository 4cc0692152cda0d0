"""Where a worker runs: in a virtual environment, in a container, or in a Python that is used as it is."""
