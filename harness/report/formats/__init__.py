"""How a report is written: Markdown, LaTeX, a page, the terminal."""
