"""What a norm of a trained model gets, and what it makes of it."""
