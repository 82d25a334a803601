"""Physics-informed networks at equal time: the equations, the rivals, the runs and their table."""
