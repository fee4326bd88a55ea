"""Is this machine, or the way to that peer, as fast as it should be, and if not, why?

`facts` reads what machines have and promise, `measure` takes figures, `advice` (pure) judges them,
`report` shows it. `serve` is the cooperating end; `examine` joins them. docs/doctor.md explains.
"""
