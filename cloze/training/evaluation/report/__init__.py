"""The report of an evaluation: one page with tables and charts, and its figures as JSON and Markdown."""
