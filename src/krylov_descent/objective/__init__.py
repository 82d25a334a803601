"""The objective: the user's closure on a set of samples, its value, gradient and checks."""
