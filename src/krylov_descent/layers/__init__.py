"""Layers of a model: their calls, rules for per-sample gradients, and what verifies a rule."""
