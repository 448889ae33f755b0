"""The conductor: starts the roles of a run on one machine, watches them, and ends them together."""
