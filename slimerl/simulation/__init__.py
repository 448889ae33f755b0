"""Discrete-event rollouts and network, for planning beyond this machine."""
