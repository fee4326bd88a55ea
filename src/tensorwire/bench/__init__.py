"""Measures transfers of memory beside their limits and rivals.

Above `memory` and below `cli`. A bench answers one question and says so in its docstring; what
benches share (rows, machine, statistics, processes) is here too. Nothing of this package is
imported by the layers below.
"""
