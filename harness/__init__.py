"""The instrument: plans, isolates, gates, measures, stores and reports. Imports no ML framework."""

__version__ = "0.1.0"
