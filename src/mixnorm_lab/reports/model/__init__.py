"""What records say, before it is a table, a picture or a sentence in a page."""
