"""The parts of a step that all methods share: the pass over A, acceptance of the last step, timing and report."""
