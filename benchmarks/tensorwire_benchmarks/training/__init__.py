"""`bench training`: whole steps and the exchange of a synchronous step, beside limit and rivals.

`training.py` runs the bench; `team.py` owns the processes of one system and `worker.py` is what
runs in them; `systems` has one file per system, `limit.py` what the machine allows. Their figures
become rows in `figures.py`; `traffic.py` counts what a step must move; bars are in `verdicts.py`.
"""
