"""The benches that no wheel carries: training steps, placement on real models, the rivals.

They import `tensorwire` below its command, and `tensorwire.bench`, which all benches share.
`engine.py` runs the tables of `benches.py`: models, wires, `systems`, bars. `commands.py` has the
commands, `workloads` real models, `rivals` the other libraries of `tensorwire bench memory`.
In `tensorwire` only `bench/checkout.py` knows of this package.
"""
