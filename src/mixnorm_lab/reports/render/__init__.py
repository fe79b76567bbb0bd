"""A report as a page, a Markdown file or a document."""
