"""The model of a report: numbers from records, before they are a table, a picture or a sentence in a page."""
