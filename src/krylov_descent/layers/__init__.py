"""Layers of a model: their calls, rules for per-sample gradients, and the verification of rules."""
