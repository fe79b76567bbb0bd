"""A comparison of norms, from what a user asks for to the report: the work behind ``mixnorm compare``."""
