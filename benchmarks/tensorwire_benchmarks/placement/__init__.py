"""`bench placement`: what placing gradients before they exist gains, on real models.

`placement.py` runs the bench with the stages of `training`; `shares.py` cuts a step into
computation and communication; bars are in `verdicts.py`, tables and figure in `report.py`.
"""
