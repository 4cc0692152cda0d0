"""Samplers, memory management and small tools."""
