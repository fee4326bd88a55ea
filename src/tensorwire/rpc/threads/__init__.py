"""Has the interface of grpcio: channels, calls and servers whose callers are threads."""
