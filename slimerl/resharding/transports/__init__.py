"""Carriers: how bytes of logical tensors get into engines. The only part of this room that does I/O.

All are one `Carrier`: the same converter before them, the same door, reports and proof behind them. They differ in
where a bucket lies on its way: `ipc` in shared memory, `broadcast` in a process group, `disk` in a file; of `delta`
only what changed, in the store that engines report to.
`shards` has no buckets: every trainer rank sends parcels of its own part to the engine ranks that want them, by a plan
(`resharding/planner`); what it shares with the others is the loader's door, and the digests of the live parameters.
"""
