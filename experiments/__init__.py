"""The paper's experiments: problems, rivals, runs and figures. Not part of the installed package."""
