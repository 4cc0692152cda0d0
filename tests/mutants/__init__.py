"""Deliberately wrong adapters, by which the admission gate itself is tested."""
