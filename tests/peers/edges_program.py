"""A numpy program on two machines: what processes of tests/peers/test_edges_machines.py run.

"first" has an embedding, "second" a layer on the mean of the words of a sentence. Sentences have
any number of words, so the words' vectors and their gradients are unbounded.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorwire import Node, Peer
from tensorwire.edges import Edges
from tensorwire.placement import Graph, Operator, Tensor, UpTo, plan
from tensorwire.testing import Channel

WORDS, WIDTH, BATCH = 500, 16, 8

GRAPH = Graph(
    (
        Tensor("words", "int64", (None,)),
        Tensor("lengths", "int64", (BATCH,)),
        Tensor("vectors", "float32", (None, WIDTH)),
        Tensor("wanted", "float32", (BATCH,)),
        Tensor("long", "float32", (UpTo(BATCH), 2)),
        Tensor("answers", "float32", (BATCH,)),
        Tensor("gradient", "float32", (None, WIDTH)),
    ),
    (
        Operator("read", "first", (), ("words", "lengths", "wanted"), 0),
        Operator("choose", "first", ("lengths",), ("long",), 1),
        Operator("embed", "first", ("words",), ("vectors",), 2),
        Operator("use", "second", ("vectors", "lengths", "long"), ("answers",), 3),
        Operator(
            "back",
            "second",
            ("vectors", "lengths", "answers", "wanted"),
            ("gradient",),
            4,
        ),
        Operator("learn", "first", ("words", "gradient", "answers"), (), 5),
    ),
)


class Program:
    """The operators' functions, their weights, and the answers so far."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.table = random.standard_normal((WORDS, WIDTH)).astype("float32")
        self.weight = random.standard_normal(WIDTH).astype("float32")
        self.answers: list[Any] = []
        self.step = 0

    def read(self) -> tuple[Any, ...]:
        random = np.random.default_rng(self.step)
        self.step += 1
        lengths = random.integers(1, 30, BATCH)
        words = random.integers(0, WORDS, lengths.sum())
        return words, lengths, random.random(BATCH, np.float32)

    def choose(self, lengths: Any) -> tuple[Any, ...]:
        long = np.flatnonzero(lengths > 15)
        return (np.stack([long, lengths[long]], 1).astype("float32"),)

    def embed(self, words: Any) -> tuple[Any, ...]:
        return (self.table[words],)

    def use(self, vectors: Any, lengths: Any, long: Any) -> tuple[Any, ...]:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        means = np.add.reduceat(vectors, starts) / lengths[:, None].astype("float32")
        answers = means @ self.weight
        answers[long[:, 0].astype(int)] += long[:, 1] / 100
        return (answers,)

    def back(self, vectors: Any, lengths: Any, answers: Any, wanted: Any) -> tuple[Any, ...]:
        error = np.repeat((answers - wanted) / lengths.astype("float32"), lengths)
        gradient = error[:, None] * self.weight
        self.weight = self.weight - np.float32(0.01) * (error @ vectors)
        return (gradient,)

    def learn(self, words: Any, gradient: Any, answers: Any) -> tuple[Any, ...]:
        np.subtract.at(self.table, words, np.float32(0.1) * gradient)
        self.answers.append(answers.copy())
        return ()


def run(program: Program, steps: int, machine: str | None, edges: Edges | None) -> None:
    """Runs a machine's operators in order; without a machine all of them."""
    mine = [o for o in GRAPH.operators if machine in (None, o.machine)]
    crossing = {(c.tensor.name, c.target) for c in GRAPH.crossings()}
    leaving = {name for name, target in crossing if target != machine}
    for _ in range(steps):
        values: dict[str, Any] = {}
        arrivals = []
        for operator in sorted(mine, key=lambda o: o.order):
            for name in operator.inputs:
                if name not in values:
                    assert edges is not None
                    arrivals.append(edges.get(name))
                    values[name] = arrivals[-1].value
            function: Callable[..., tuple[Any, ...]] = getattr(program, operator.name)
            made = function(*(values[name] for name in operator.inputs))
            for name, value in zip(operator.outputs, made, strict=True):
                values[name] = value
                if edges is not None and name in leaving:
                    edges.put(name, value)
        for arrival in arrivals:
            arrival.release()


def join(
    channel: Channel, machine: str, transport: str, **options: Any
) -> tuple[Node, dict[str, Peer]]:
    """Connects two processes, by way of the one that started them."""
    node = Node(machine, transports=[transport], **options)
    channel.send(node.address)
    other = channel.recv()
    peer = node.connect(other) if machine == "first" else node.accept(timeout_s=30)
    return node, {peer.name: peer}


def work(
    channel: Channel,
    machine: str,
    transport: str,
    steps: int,
    options: dict[str, Any] | None = None,
) -> Any:
    """One process; `options` are for its Node."""
    node, peers = join(channel, machine, transport, **(options or {}))
    assert {peer.path.transport for peer in peers.values()} == {transport}
    program = Program()
    with node, Edges(node, plan(GRAPH), machine, peers) as edges:
        edges.open()
        run(program, steps, machine, edges)
    assert "torch" not in sys.modules
    return program.table, program.weight, program.answers


def wait_for_the_other(channel: Channel, machine: str, transport: str) -> Any:
    """Uses its edges until the other process is gone, and tells how it was told."""
    node, peers = join(channel, machine, transport)
    with node:
        edges = Edges(node, plan(GRAPH), machine, peers)
        edges.open()
        channel.send("open")
        try:
            run(Program(), 1 << 30, machine, edges)
        except ConnectionError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            edges.close()
