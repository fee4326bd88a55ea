"""Has the interface of `grpc.aio`: channels, calls and servers of an event loop."""
