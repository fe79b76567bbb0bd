"""A user's own functions, such as "my_module:build": finding and calling them, and what their source files hold."""
