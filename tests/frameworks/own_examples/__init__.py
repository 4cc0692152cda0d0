"""Each adapter beside its library's own example: the same network, weights, batch and bound, one written for the
benchmark, the other as the library's public documentation has it.

``python -m tests.frameworks.own_examples`` measures; ``worker`` runs in a framework's environment.
"""
