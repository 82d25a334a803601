"""The sketched Gauss–Newton flow, for physics-informed networks and least squares."""
