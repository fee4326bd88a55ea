"""The benches that no wheel carries: training steps, placement on real models, the rivals.

They stand on `tensorwire` below its command and on what all benches share, `tensorwire.bench`.
`engine.py` runs what `benches.py` has as tables: models, wires, `systems`, bars. `commands.py` is
what the command line gets, `workloads` are real models, `rivals` the other libraries of
`tensorwire bench memory`. In `tensorwire` nothing but `bench/checkout.py` knows of this package.
"""
