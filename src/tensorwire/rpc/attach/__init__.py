"""Joins the two ends of a channel: how each finds out that the other has tensorwire.

`negotiation` is the client side, `registry` the server side, `terms` what they tell each other.
"""
