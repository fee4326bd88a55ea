"""Settings and calls of the runtime that are given otherwise than usual, in both worlds."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from ends import ALONE, RUNTIME_SHM, Ends, Methods, System
from test_aio import runner
from test_aio_runtime import FOUR
from test_rpc_conformance import US, UU, wait_for
from test_rpc_runtime import way

from tensorwire import rpc
from tensorwire.rpc.threads.factories import chosen_transports, secure_transports

SYNC = System("shm", RUNTIME_SHM, RUNTIME_SHM)


@pytest.fixture
def both() -> Iterator[Ends]:
    made = Ends(SYNC, {"/t/way": UU(way)})
    yield made
    made.close()


MAKERS: dict[str, Callable[..., Any]] = {
    "channel": partial(rpc.insecure_channel, "localhost:1"),
    "server": partial(rpc.server, ThreadPoolExecutor(1)),
    "aio channel": partial(rpc.aio.insecure_channel, "localhost:1"),
    "aio server": rpc.aio.server,
}


@pytest.fixture(params=MAKERS)
def runtime_of(request: pytest.FixtureRequest) -> Callable[..., str]:
    """Makes an end with these options, and tells what it says of the runtime."""

    async def main(given: dict[str, Any]) -> str:
        made = MAKERS[request.param](**given)
        said = str(made.runtime)
        if request.param.startswith("aio"):
            await (made.close() if request.param == "aio channel" else made.stop(None))
        elif request.param == "channel":
            made.close()
        else:
            made.stop(None).wait()
        return said

    return lambda **given: asyncio.run(main(given))


@pytest.mark.parametrize("value", ["attachments", "runtime", 1, ("shm",)])
def test_a_runtime_that_is_no_truth_value(runtime_of: Callable[..., str], value: Any) -> None:
    with pytest.raises(ValueError, match="runtime is True, False or None, not"):
        runtime_of(runtime=value)


SECURE = {
    "secure channel": partial(rpc.secure_channel, "localhost:1", grpc.local_channel_credentials()),
    "aio secure channel": partial(
        rpc.aio.secure_channel, "localhost:1", grpc.local_channel_credentials()
    ),
}


@pytest.mark.parametrize("kind", [*MAKERS, *SECURE])
def test_settings_that_cannot_be(kind: str) -> None:
    """Each is refused where it is given; else payload would travel inside without a notice."""
    bad: list[tuple[str, Any, str]] = [
        ("threshold_bytes", -1, "threshold_bytes is a whole number from 0 up, not -1"),
        ("threshold_bytes", "1MB", "threshold_bytes is a whole number from 0 up, not '1MB'"),
        ("pool_bytes", 0, "pool_bytes is a whole number from 1 up, not 0"),
        ("pool_bytes", 1e9, "pool_bytes is a whole number from 1 up, not 1000000000.0"),
        ("patience_s", -1, "patience_s is a number of seconds from 0 up, not -1"),
        ("patience_s", float("nan"), "patience_s is a number of seconds from 0 up, not nan"),
        ("patience_s", "1", "patience_s is a number of seconds from 0 up, not '1'"),
        ("max_attachments", -1, "max_attachments is a whole number from 0 up, not -1"),
        ("max_attachments", 2.0, "max_attachments is a whole number from 0 up, not 2.0"),
    ]
    for name, value, says in bad:
        with pytest.raises(ValueError, match=f"^{says}"):
            rpc.Limits(**{name: value})
    bad = [("limits", {"pool_bytes": 1}, "limits is a tensorwire.rpc.Limits, not {")]
    named = {"plaintext_transports"} if kind in SECURE else {"transports"}
    if "server" in kind:
        named.add("plaintext_transports")
        bad += [("listen", 5, "listen is the name or address of a host, not 5")]
    for name in named:
        bad += [
            (name, "shm", f"{name} is a tuple of names, as in"),
            (name, 7, f"{name} is a tuple of names, as in"),
            (name, ("shm", "ib"), f"{name} are shm, tcp and rdma, not ib"),
        ]

    async def main() -> None:
        for name, value, says in bad:
            with pytest.raises(ValueError, match=f"^{says}"):
                {**MAKERS, **SECURE}[kind](**{name: value})

    asyncio.run(main())


def test_settings_of_numpy_and_a_generator(both: Ends) -> None:
    """Numbers need not be Python's own, and names may come one by one."""
    limits = rpc.Limits(pool_bytes=np.int64(1 << 20))
    both.system = System("shm", RUNTIME_SHM, {"runtime": True, "limits": limits})
    target = f"127.0.0.1:{both.serve().port}"
    names = (each for each in ["shm"])
    limits = rpc.Limits(
        threshold_bytes=np.int32(1), pool_bytes=np.int64(1 << 20), patience_s=np.float32(0.5)
    )
    with rpc.insecure_channel(target, limits=limits, transports=names, runtime=True) as channel:
        channel.attach(10)
        assert channel.unary_unary("/t/way")(b"") == b"runtime"
        assert channel.payload == "shm"
        assert channel.attachment.runtime_threshold_bytes == 1


def test_names_of_options_as_bytes(runtime_of: Callable[..., str]) -> None:
    """grpcio takes them too."""
    said = runtime_of(runtime=True, options=[(b"grpc.max_receive_message_length", 77)])
    assert said in ("offered", "grpcio: no call was made yet")
    said = runtime_of(runtime=True, options=[(b"grpc.service_config", "{}")])
    assert said == "grpcio: it does not know the option grpc.service_config"


def test_options_and_interceptors_that_can_be_looked_at_once(both: Ends) -> None:
    """Both the runtime and grpcio get them."""
    seen: list[str] = []

    class Seen(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append(details.method)
            return continuation(details)

    limit = [("grpc.max_receive_message_length", 1000)]
    both.system = System("shm", {"runtime": True}, {"runtime": True})
    both.methods["/t/long"] = UU(lambda request, context: bytes(1001))
    channel = both.serve(interceptors=iter([Seen()])).channel(options=iter(limit))
    for plain in ({}, {"compression": grpc.Compression.NoCompression}):
        seen.clear()
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/t/long")(b"", **plain)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert seen == ["/t/long"]
    assert channel.runtime == "shm"


def test_options_and_interceptors_of_asyncio_that_can_be_looked_at_once() -> None:
    seen: list[str] = []

    class Seen(grpc.aio.ServerInterceptor):  # type: ignore[misc]
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            seen.append(details.method)
            return await continuation(details)

    async def long(request: bytes, context: Any) -> bytes:
        return bytes(1001)

    async def main() -> None:
        limit = [("grpc.max_receive_message_length", 1000)]
        server = rpc.aio.server(interceptors=iter([Seen()]), runtime=True)
        server.add_generic_rpc_handlers((Methods({"/t/long": UU(long)}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        target = f"127.0.0.1:{port}"
        async with rpc.aio.insecure_channel(target, iter(limit), runtime=True) as channel:
            await channel.attach()
            for plain in ({}, {"metadata": (("a", "x" * 17_000),)}):  # too long: by grpcio
                seen.clear()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/t/long")(b"", **plain)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert seen == ["/t/long"]
            assert channel.runtime == "shm"
        await server.stop(None)

    asyncio.run(main())


@pytest.mark.parametrize(("value", "by"), [("runtime", b"runtime"), ("attachments", b"grpcio")])
def test_asyncio_ends_of_which_only_the_environment_speaks(
    value: str, by: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(channel: Any) -> None:
        await channel.attach()
        assert await channel.unary_unary("/t/way")(b"") == by
        assert channel.payload == "shm"

    monkeypatch.setenv("TENSORWIRE_RPC", value)
    runner({}, {})(FOUR, test)


@pytest.mark.parametrize("kind", ["call", "with_call", "future", "aio"])
def test_a_call_that_is_made_again_has_what_is_left_of_its_timeout(both: Ends, kind: str) -> None:
    """A server that takes its time to refuse it."""

    class Slow(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, continuation: Any, details: Any) -> Any:
            time.sleep(0.3 if details.method == "/t/us" else 0)
            return continuation(details)

    both.methods["/t/us"] = US(lambda request, context: iter([b"%f" % context.time_remaining()]))
    channel = both.serve(interceptors=[Slow()]).channel()

    async def main() -> bytes:
        async with rpc.aio.insecure_channel(f"127.0.0.1:{both.port}", **RUNTIME_SHM) as channel:
            await channel.attach()
            assert await channel.unary_unary("/t/way")(b"") == b"runtime"
            return bytes(await channel.unary_unary("/t/us")(b"", timeout=5))

    if kind == "aio":
        left = asyncio.run(main())
    else:
        assert channel.unary_unary("/t/way")(b"") == b"runtime"
        call = channel.unary_unary("/t/us")
        if kind == "call":
            left = call(b"", timeout=5)
        elif kind == "with_call":
            left, _ = call.with_call(b"", timeout=5)
        else:
            left = call.future(b"", timeout=5).result()
    assert float(left) < 4.5


def test_what_a_channel_says_whose_server_is_gone(both: Ends) -> None:
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    both.server.stop(None).wait()
    wait_for(lambda: channel.attachment is None)
    assert channel.payload == "inside: the connection of the attachment is over"
    assert channel.runtime == "grpcio: the connection of the attachment is over"


def test_what_a_channel_says_that_sends_plain_messages_for_a_while(both: Ends) -> None:
    channel = both.serve().channel()
    assert channel.unary_unary("/t/way")(b"") == b"runtime"
    channel.share.pause()
    assert channel.payload.startswith("inside: a call met a server that does not know")
    assert channel.runtime.startswith("grpcio: a call met a server that does not know")
    assert channel.unary_unary("/t/way")(b"") == b"grpcio"


def test_more_channels_than_attachments(both: Ends) -> None:
    both.system = System(
        "shm",
        RUNTIME_SHM,
        {**RUNTIME_SHM, "limits": rpc.Limits(threshold_bytes=1, max_attachments=2)},
    )
    both.serve()
    channels = [both.channel(options=[ALONE]) for _ in range(3)]
    ways = [each.unary_unary("/t/way")(b"") for each in channels]
    assert ways == [b"runtime", b"runtime", b"grpcio"]
    assert "2 clients, the most that this server" in channels[2].runtime


class Changing(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Calls another method than the user, with other metadata."""

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        details = details._replace(method="/t/seen", metadata=(("added", "1"),), timeout=20)
        return continuation(details, request + b"!")


def test_an_interceptor_that_changes_the_call(both: Ends) -> None:
    def seen(request: bytes, context: Any) -> bytes:
        assert ("added", "1") in [tuple(each) for each in context.invocation_metadata()]
        assert context.time_remaining() <= 20
        return request + way(request, context)

    both.methods["/t/seen"] = UU(seen)
    call = grpc.intercept_channel(both.serve().channel(), Changing()).unary_unary("/t/way")
    assert call(b"x") == call.future(b"x").result(20) == b"x!runtime"


def test_an_interceptor_of_asyncio_that_changes_the_call(both: Ends) -> None:
    def seen(request: bytes, context: Any) -> bytes:
        assert ("added", "1") in [tuple(each) for each in context.invocation_metadata()]
        return request + way(request, context)

    class Changes(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            metadata = grpc.aio.Metadata(("added", "1"))
            details = details._replace(method=b"/t/seen", metadata=metadata)
            return await continuation(details, request + b"!")

    both.methods["/t/seen"] = UU(seen)
    both.serve()

    async def main() -> None:
        target, changes = f"127.0.0.1:{both.port}", [Changes()]
        async with rpc.aio.insecure_channel(target, None, None, changes, **RUNTIME_SHM) as channel:
            await channel.attach()
            assert await channel.unary_unary("/t/way")(b"x") == b"x!runtime"

    asyncio.run(main())


FORK = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from tensorwire import rpc
from tensorwire.rpc.threads.factories import chosen_transports, secure_transports

go = threading.Event()

def held(request, context):
    assert go.wait(20) and context.is_active()
    return b"held"

kinds = {"Held": held, "Echo": lambda request, context: request}
kinds = {name: grpc.unary_unary_rpc_method_handler(each) for name, each in kinds.items()}
server = rpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", kinds),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with rpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    channel.attach()
    future = channel.unary_unary("/t/Held").future(b"")
    assert channel.runtime == "shm"
    pid = os.fork()
    if pid == 0:
        future.cancel()
        print(future.code().name, channel.runtime, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert channel.unary_unary("/t/Echo")(b"x") == b"x"
    go.set()
    print(future.result().decode(), channel.runtime)
server.stop(None).wait()
"""


def test_a_fork_with_a_call_under_way(tmp_path: Path) -> None:
    """The child may do anything with its copy of the call: server and parent do not notice."""
    file = tmp_path / "fork.py"
    file.write_text(FORK)
    environment = {**os.environ, "TENSORWIRE_RPC": "runtime"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    over = "CANCELLED grpcio: the connection of the attachment is over\n"
    assert (done.returncode, done.stdout) == (0, f"{over}held shm\n"), done.stderr


@pytest.mark.parametrize(
    ("value", "named", "by"),
    [
        ("", None, "shm"),
        ("tcp", None, "tcp"),
        (" tcp , shm", None, "shm"),
        ("tcp", ("shm",), "shm"),
        ("rdma", None, "inside"),
    ],
)
def test_the_environment_leaves_transports_out_where_nobody_names_them(
    value: str, named: tuple[str, ...] | None, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", value)
    settings: dict[str, Any] = {} if named is None else {"transports": named}
    ends = Ends(System("", settings, settings), {"/t/uu": UU(lambda request, context: request)})
    channel = ends.serve().channel()
    assert channel.unary_unary("/t/uu")(bytes(1 << 20)) == bytes(1 << 20)
    assert channel.payload.partition(":")[0] == by
    if by == "inside":
        assert channel.payload == "inside: transports= and TENSORWIRE_TRANSPORTS leave none"
    ends.close()


def test_the_environment_holds_for_asyncio_and_what_is_encrypted_and_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "tcp")
    assert chosen_transports(None, ("shm",)) == ()  # of asyncio
    assert secure_transports(()) == ()
    assert secure_transports(("tcp",)) == ("tcp",)
    monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "tcp,rope")
    with pytest.raises(ValueError, match="TENSORWIRE_TRANSPORTS are shm, tcp and rdma, not rope"):
        rpc.insecure_channel("127.0.0.1:1")
