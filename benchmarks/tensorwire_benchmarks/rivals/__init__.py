"""The other libraries that move memory, one file each, as `tensorwire bench memory` measures them.

`tensorwire.bench.rivals` lists them. Each runs in a pair of processes of its own
(`tensorwire.bench.processes`) and is tuned as its users would tune it.
"""
