"""Safety of a run: atomic steps, checksums of states, memory budgets."""
