"""Deadlines, process lifetimes and failure kinds."""
