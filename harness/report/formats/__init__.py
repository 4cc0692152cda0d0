"""Formats of a report: Markdown, LaTeX, a page, the terminal."""
