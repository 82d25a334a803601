"""KSD inside the training loops of other frameworks: one module each, which needs its framework; nothing else does."""
