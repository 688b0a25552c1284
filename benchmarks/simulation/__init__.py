"""Averages among thousands of ranks, simulated: see README.md."""
