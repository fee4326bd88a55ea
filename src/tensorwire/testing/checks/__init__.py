"""The checks that every transport must pass, by subject; `tensorwire.testing.conformance` runs them.

A check is a function of one `Stage`. It fails by an assertion or any other exception.
"""
