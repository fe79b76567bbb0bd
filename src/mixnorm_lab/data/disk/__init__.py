"""Data sets of the user's own on disk: folders of images, data sets that Hugging Face's datasets saved, tables."""
