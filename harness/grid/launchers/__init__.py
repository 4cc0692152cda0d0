"""Engines that hand out units. Each imports what it needs when it is asked for, and not before."""
