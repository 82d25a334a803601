"""Strategies of a user's own: each file adds one to KSD, and holds it to the same contract."""
