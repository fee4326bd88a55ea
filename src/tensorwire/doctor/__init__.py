"""Finds out whether this machine, or the path to a peer, is as fast as it should be, or why not.

`facts` reads what machines have and promise, `measure` takes figures, `advice` (pure) judges them,
`report` shows it. `serve` is the cooperating end; `examine` joins them. docs/doctor.md explains.
"""
