"""The paper's Table 2 and Figures 1 and 2, run again."""
