"""Objax: DP-SGD by ``PrivateGradValues``, and the same without privacy."""
