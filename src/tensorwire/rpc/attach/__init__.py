"""Joins the two ends of a channel: how each finds out that the other has tensorwire.

`negotiation` is the client side, `sharing` the part of each of its channels, `registry` the server
side, `terms` the messages between them. `marks` tells servers of which attachment a call is.
"""
