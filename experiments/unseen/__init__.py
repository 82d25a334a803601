"""The study of the trial of ``check``: whether the line that it prints is a good one, on problems it has not seen."""
