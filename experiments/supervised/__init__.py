"""Networks trained on samples: problems and methods of the paper's study and of that of deep networks."""
