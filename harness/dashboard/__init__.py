"""The static site over the history: pages, feed, badge."""
