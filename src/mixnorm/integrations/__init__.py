"""Mixture norms in the company of other packages, one file each; nothing here is imported by ``import mixnorm``."""
