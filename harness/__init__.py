"""The instrument, which imports no ML framework. These are its stages.

plan -> environments -> gate -> run (which starts workers) -> store -> analysis -> report.

Beside them stand compare, history, published (the committed results), dashboard, ci, data and cli.
``contract``, ``layer_contract``, ``tasks`` and ``layers`` are the face towards adapters; they never move, because old
adapters import them.
"""

__version__ = "0.1.0"
