"""Carriers: how bytes of logical tensors get into engines. The only part of this room that does I/O.

All are one `Carrier`: the same converter before them, the same door, reports and proof behind them. They differ in
where a bucket lies on its way: `ipc` in shared memory, `broadcast` in a process group, `disk` in a file.
"""
