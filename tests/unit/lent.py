"""A server's lending of memory to readers, without the server."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tensorwire import Node
from tensorwire.parameters import Layout, Spec, TensorSpec
from tensorwire.parameters.server.lending.budget import CopyBudget
from tensorwire.parameters.server.lending.lending import Lending

SPEC = Spec("sgd", (), 1, 1, (TensorSpec("t", "float32", (1000,), "trained"),))


def make_lending(door: Node, budget: CopyBudget, store: int = 0) -> Lending:
    share = Layout(SPEC).deal(1)[0]
    regions: Any = SimpleNamespace(share=share, server=0, servers=1)
    master = np.zeros(share.size_bytes, np.uint8)
    memory: Any = SimpleNamespace(states=(), average=None, master=master)
    return Lending(door, store, regions, memory, dict, {}, {}, lambda: None, budget)
