"""The sample sets of a step: loading, permutation, subsets of fixed size and sets that grow."""
