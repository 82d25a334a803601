"""What is done to break KSD: random problems, corrupted checkpoints, kills, long runs; ``python -m reliability``."""
