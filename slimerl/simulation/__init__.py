"""Simulated hardware and load, for planning beyond this machine."""
