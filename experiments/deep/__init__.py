"""The study of deep networks: what a second-order method gains over tuned rivals, at 1, 5 and 20 minutes."""
