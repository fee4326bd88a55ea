"""A model served over gRPC: its arrays travel beside the messages, straight into the other process.

A server process has the weights of a small network and computes; the client sends batches and gets
scores, and fetches the weights to compare. Everything is grpcio, but for the two lines that make
the channel and the server. It needs tensorwire[rpc], and no torch.
"""

import argparse
import multiprocessing
import time
from concurrent import futures
from multiprocessing.connection import Connection

import grpc
import numpy as np

from tensorwire import rpc

FEATURES, CLASSES = 2048, 64


class Model:
    """A linear layer, whose weights are packed once and sent with each request for them."""

    def __init__(self) -> None:
        self.array = np.random.default_rng(0).standard_normal((FEATURES, CLASSES), "float32")
        self.weights = rpc.pack(self.array, owner=self)

    def predict(self, request: rpc.Tensor, context: grpc.ServicerContext) -> rpc.Tensor:
        return rpc.pack(rpc.unpack(request) @ self.array)

    def get_weights(self, request: rpc.Tensor, context: grpc.ServicerContext) -> rpc.Tensor:
        return self.weights


def serve(pipe: Connection) -> None:
    """Runs the server until the other end of the pipe is closed."""
    model = Model()
    server = rpc.server(futures.ThreadPoolExecutor(2))
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            method, rpc.Tensor.FromString, rpc.Tensor.SerializeToString
        )
        for name, method in (("Predict", model.predict), ("Weights", model.get_weights))
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Model", handlers),)
    )
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    try:
        pipe.recv()
    except EOFError:
        pass
    server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=[there])
    process.start()
    there.close()
    target = f"127.0.0.1:{here.recv()}"
    with rpc.insecure_channel(target, transports=(options.transport,)) as channel:
        channel.attach()  # without it, the first calls are grpcio's until the attachment is open
        types = rpc.Tensor.SerializeToString, rpc.Tensor.FromString
        predict = channel.unary_unary("/example.Model/Predict", *types)
        weights = rpc.unpack(channel.unary_unary("/example.Model/Weights", *types)(rpc.Tensor()))

        batch = np.ones((256, FEATURES), "float32")
        started = time.perf_counter()
        for number in range(options.batches):
            scores = rpc.unpack(predict(rpc.pack(batch * number)))
        per_batch_ms = (time.perf_counter() - started) / options.batches * 1e3
        assert np.allclose(scores, (batch * number) @ weights, rtol=1e-3, atol=1e-2)
        print(f"{options.batches} batches of {batch.nbytes >> 20} MiB by {channel.payload}")
        print(f"{per_batch_ms:.1f} ms for each, there and back, with the computation")
    here.close()
    process.join()


if __name__ == "__main__":
    main()
