"""Deadlines and process lifetimes."""
