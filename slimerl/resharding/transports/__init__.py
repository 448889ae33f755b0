"""Carriers: how bytes of logical tensors get into engines. The only part of this room that does I/O."""
