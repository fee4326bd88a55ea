"""The benches that no wheel carries: training steps, placement on real models, the rivals.

They stand on `tensorwire` below its command and on what all benches share, `tensorwire.bench`.
`commands.py` is what the command line gets; `training` and `placement` are two benches, `workloads`
their models, `rivals` the other libraries of `tensorwire bench memory`. In `tensorwire` nothing but
`bench/checkout.py` knows of this package.
"""
