"""Stands in the place of Opacus for processes that have this file's folder in PYTHONPATH: dpcore comes in its place."""

import importlib

from dpcore.opacus_names.alias import install

install(stand_ins=[__name__])
importlib.import_module(__name__)
