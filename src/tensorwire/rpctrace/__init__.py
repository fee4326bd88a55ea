"""Records the calls and messages of a program's RPCs: `tensorwire rpc trace`.

`recorder.py` and `patches.py` run in the traced processes, whose Python need not have tensorwire:
they import the standard library only. `runner.py` starts the program, `figures.py` adds up what its
processes have recorded, `drawing.py` shows it.
"""
