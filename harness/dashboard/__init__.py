"""The static site over the history: pages and a feed."""
