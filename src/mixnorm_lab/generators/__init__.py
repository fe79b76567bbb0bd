"""Generators of images and of points in the plane: their training, and how they are measured."""
