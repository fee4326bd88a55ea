"""Carries calls as frames through memory that both ends share, instead of HTTP/2.

docs/rpc.md says which calls do, docs/internals/rpc-wire.md has the frames as tables. Below:
`frames` and `flow` (pure), `ring` (bytes in memory), `line` (frames there and back); then the two
ends.
"""
