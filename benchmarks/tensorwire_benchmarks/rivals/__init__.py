"""The other libraries of `tensorwire bench memory` that move memory, one file each.

`tensorwire.bench.rivals` lists them. Each runs in a pair of processes of its own
(`tensorwire.bench.processes`) and is tuned as its users would tune it.
"""
