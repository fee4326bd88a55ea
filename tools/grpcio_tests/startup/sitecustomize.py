"""Replaces the six factories of grpcio in every Python process of a run.

TENSORWIRE_GRPCIO_TESTS has the factories and their keywords. They are replaced when grpc has been
imported, and not before: tests set variables that grpc reads on import.
"""

import importlib.util
import json
import os
import signal
import sys
from collections import Counter
from functools import partial
from typing import Any

USED: Counter[str] = Counter()
"""Counts of this process's calls and messages by path, since it was cleared."""

REPLACED: list[bool] = []
"""Not empty once the factories are replaced."""


class WhenImported:
    """An import hook that replaces grpc's factories right after grpc's import."""

    def __init__(self, factories: dict[str, dict[str, Any]]) -> None:
        self._factories = factories

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "grpc":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            replace(self._factories)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def replace(factories: dict[str, dict[str, Any]]) -> None:
    import grpc
    import grpc.aio
    import grpc.experimental.aio

    from tensorwire import rpc
    from tensorwire.rpc.payload import attachment, outgoing
    from tensorwire.rpc.runtime import observed
    from tensorwire.rpc.threads import channel

    for name, keywords in factories.items():
        theirs, ours = (grpc.aio, rpc.aio) if name.startswith("aio.") else (grpc, rpc)
        factory = name.removeprefix("aio.")
        limits = keywords.get("limits")
        given = {**keywords, "limits": rpc.Limits(**limits)} if limits else keywords
        new = partial(getattr(ours, factory), **given)
        setattr(theirs, factory, new)
        if theirs is grpc.aio:
            setattr(grpc.experimental.aio, factory, new)
    count(attachment.RpcAttachment, "begin_call", "attached")
    count(outgoing, "seal", "ahead")
    for arity in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        attach_before(channel.RpcChannel, arity)
    observed.OBSERVER = observe
    REPLACED.append(True)


def attach_before(kind: Any, name: str) -> None:
    """Makes a channel wait up to 5 s for its attachment before it makes its first method."""
    make = getattr(kind, name)

    def made(self: Any, *given: Any, **named: Any) -> Any:
        if not vars(self).setdefault("_asked_by_tests", False):
            self._asked_by_tests = True
            self.attach(5)
        return make(self, *given, **named)

    setattr(kind, name, made)


def count(module: Any, name: str, word: str) -> None:
    called = getattr(module, name)

    def counted(*given: Any, **named: Any) -> Any:
        USED[word] += 1
        return called(*given, **named)

    setattr(module, name, counted)


def observe(side: str, arity: str, method: str) -> None:
    USED["runtime"] += side == "client"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells ignore it in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
if given := os.environ.get("TENSORWIRE_GRPCIO_TESTS"):
    sys.meta_path.insert(0, WhenImported(json.loads(given)))
