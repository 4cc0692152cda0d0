"""The contestants: one folder per framework (``adapter.py``, ``framework.toml``, ``requirements.txt``, ``NOTES.md``).

``adapter.py`` offers ``create(variant: str) -> harness.contract.Adapter`` and runs inside the framework's own
environment; ``_shared/torch/models.py`` is what all the contestants built on PyTorch share.
"""
