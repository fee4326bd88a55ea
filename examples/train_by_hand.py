"""Data-parallel training written by hand on remote memory: one server, two workers, numpy.

The server owns the parameters. In every step each worker writes its gradient into its slot in the
server's memory, with a signal; the server applies SGD with momentum and writes the new parameters
into each worker's memory, with a signal. Two transfers per worker and step, and nobody is called.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # more threads are slower on small matrices

import argparse
import subprocess
import sys
import time

import numpy as np
from rich.progress import Progress
from sklearn.datasets import load_digits

import tensorwire as tw

WORKERS, BATCH, RATE, MOMENTUM = 2, 32, 0.1, 0.9
SHAPES = ((64, 128), (128,), (128, 10), (10,))  # one hidden layer, ten scores
ENDS = np.cumsum([np.prod(shape) for shape in SHAPES])
COUNT, SPENT = int(ENDS[-1]), ("computing", "waiting", "writing")
MESSAGE = COUNT + 1 + len(SPENT)  # a gradient, its loss, seconds spent
HEADER = 64  # bytes before the payload of a region; its signal word is there


class Stopwatch(dict):
    def lap(self, what):
        self.at, before = time.perf_counter(), getattr(self, "at", None)
        self[what] = self.get(what, 0) + self.at - (before or self.at)


def load():
    """Returns images and labels for training, then for the test; the same in every process."""
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, labels = (x[order] / 16).astype("float32"), labels[order]
    return x[360:], labels[360:], x[:360], labels[:360]


def split(flat):
    """Returns the weights as arrays that share the memory of a flat vector."""
    parts = np.split(flat[:COUNT], ENDS[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def forward(weights, x):
    w1, b1, w2, b2 = weights
    hidden = np.maximum(x @ w1 + b1, 0)
    odds = np.exp(hidden @ w2 + b2)
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def compute_gradient(weights, x, labels, gradient):
    hidden, error = forward(weights, x)
    picked = np.arange(len(x)), labels
    loss = -np.log(error[picked]).mean()
    error[picked] -= 1
    error /= len(x)
    back = (error @ weights[2].T) * (hidden > 0)
    w1, b1, w2, b2 = gradient
    w1[:], b1[:], w2[:], b2[:] = x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)
    return loss


def work(rank, server_address, steps):
    """Runs a worker: waits for parameters, computes, writes its gradient, `steps` times."""
    x, labels, _, _ = load()
    message, spent, random = np.zeros(MESSAGE, "float32"), Stopwatch(), np.random.default_rng(rank)
    with tw.Node(f"worker-{rank}") as node:
        region = node.allocate(HEADER + 4 * COUNT, name="parameters", access="w")
        version, weights = region.word(0), split(region[HEADER:].array("float32"))
        server = node.connect(server_address)
        slot, sent = server.region(f"gradient-{rank}"), []
        for step in range(1, steps + 1):
            version.wait_until(step, peer=server)
            tw.wait_all(sent)  # written long ago; from here on `message` may change
            spent.lap("waiting")
            batch = random.integers(len(x), size=BATCH)
            message[COUNT] = compute_gradient(weights, x[batch], labels[batch], split(message))
            message[COUNT + 1 :] = [spent.get(what, 0) for what in SPENT]
            spent.lap("computing")
            sent = [slot[HEADER:].write(message, signal=(slot.word(0), step))]
            spent.lap("writing")
        version.wait_until(steps + 1, peer=server)  # nothing more will come


def serve(node, slots, steps, progress):
    """Runs the server: writes parameters, waits for gradients, applies them; returns accuracy."""
    _, _, test_x, test_labels = load()
    parameters = np.random.default_rng(1).normal(0, 0.1, COUNT).astype("float32")
    messages = [slot[HEADER:].array("float32") for slot in slots]
    peers = sorted((node.accept(timeout_s=30) for _ in slots), key=lambda peer: peer.name)
    targets = [peer.region("parameters") for peer in peers]
    print(f"{WORKERS} workers, connected by {peers[0].path.transport}", flush=True)
    bar, spent, velocity = progress.add_task("", total=steps), Stopwatch(), 0
    for step in range(1, steps + 1):
        sent = [to[HEADER:].write(parameters, signal=(to.word(0), step)) for to in targets]
        spent.lap("writing")
        for slot, peer in zip(slots, peers, strict=True):
            slot.word(0).wait_until(step, peer=peer)
        tw.wait_all(sent)
        spent.lap("waiting")
        velocity = MOMENTUM * velocity - RATE * sum(m[:COUNT] for m in messages) / WORKERS
        parameters += velocity
        spent.lap("computing")
        if step % 20 == 0 or step == steps:
            accuracy = (forward(split(parameters), test_x)[1].argmax(1) == test_labels).mean()
            text = f"loss {messages[0][COUNT]:.4f}, test accuracy {accuracy:.3f}"
            progress.update(bar, completed=step, description=text)
            spent.lap("testing")
    tw.wait_all([to.word(0).set(steps + 1) for to in targets])
    total, moved = sum(spent.values()), 4 * steps * WORKERS * (COUNT + MESSAGE)
    print(f"{steps} steps of {1e6 * total / steps:.0f} µs, {moved / 1e6:.0f} MB moved")
    rows = [m[COUNT + 1 :] for m in messages] + [[spent[what] for what in SPENT]]
    for name, row in zip([*(peer.name for peer in peers), "server"], rows, strict=True):
        parts = zip(SPENT, row, strict=True)
        print(f"{name:9}", *(f"{what} {s:.2f} s ({s / total:.0%})  " for what, s in parts))
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--join", nargs=2, help=argparse.SUPPRESS)  # a worker: rank, address
    options = parser.parse_args()
    command, workers = [sys.executable, __file__, f"--steps={options.steps}", "--join"], []
    try:
        if options.join:
            return work(int(options.join[0]), options.join[1], options.steps)
        with tw.Node("server") as node, Progress() as progress:
            names = [f"gradient-{rank}" for rank in range(WORKERS)]
            slots = [node.allocate(HEADER + 4 * MESSAGE, name=name, access="w") for name in names]
            for rank in range(WORKERS):
                workers.append(subprocess.Popen([*command, str(rank), node.address]))
            accuracy = serve(node, slots, options.steps, progress)
    except (tw.TensorwireError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for worker in workers:
            worker.wait()  # it ends, as it has lost its server
    return 0 if accuracy >= 0.95 else f"test accuracy {accuracy:.3f} is below 0.95"


if __name__ == "__main__":
    sys.exit(main())
