"""Containers: images, locks, the engine, and what a run needs of it."""
