"""Huge embedding tables: exact noise, drawn for a row when it is next read, trained or saved.

Every step of DP-SGD adds noise to every row of a table, and a batch reads hardly any. Here a row that no batch has had
for some steps gets what those steps would have added when it is needed: the very numbers, from their addresses, for few
steps, and one normal of their variance for many. :class:`LazyEngine` trains so; nothing of a table can be seen before
:meth:`LazyEngine.flush` has brought all rows up to date.
"""

from dpcore.lazy_tables.engine import LazyEngine

__all__ = ["LazyEngine"]
