"""Vectors of all parameters: flattening, sums over micro-batches, storage of a basis."""
