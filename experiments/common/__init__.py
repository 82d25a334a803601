"""What the studies share: the loop, records of runs, processes, and parts of tables and figures."""
