"""Uses grpcio's loggers for what users' functions raise in calls of the runtime.

So an alert or a filter that a program has for them sees both. What is ours alone goes to
`tensorwire.rpc`.
"""

import logging

COMMON = logging.getLogger("grpc._common")
"""Serializers and deserializers, but those of a server of asyncio."""
CHANNEL = logging.getLogger("grpc._channel")
"""Iterators of requests."""
SERVER = logging.getLogger("grpc._server")
"""Servicers and interceptors."""
AIO_SERVER = logging.getLogger("grpc._cython.cygrpc")
"""Servicers of asyncio, and their callbacks."""
