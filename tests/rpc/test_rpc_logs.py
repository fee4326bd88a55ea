"""What is logged, and by whom: what grpcio logs is logged where grpcio logs it."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from ends import Ends

from tensorwire import rpc
from tensorwire.rpc.negotiation import host_id


def test_errors_of_users_are_logged_where_grpcio_logs_them(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: bytes, context: Any) -> bytes:
        raise ZeroDivisionError("of the servicer")

    ends.methods = {"/t/fail": grpc.unary_unary_rpc_method_handler(fail)}
    method = ends.serve().channel().unary_unary("/t/fail")
    cannot = ends.channel().unary_unary("/t/fail", lambda request: 1 / 0)
    with caplog.at_level(logging.INFO):
        for each in (method, cannot):
            with pytest.raises(grpc.RpcError):
                each(b"x", timeout=20)
    told = {(record.name, record.getMessage()) for record in caplog.records}
    assert ("grpc._server", "Exception calling application: of the servicer") in told
    assert ("grpc._common", "Exception serializing message!") in told


@pytest.mark.parametrize("runtime", [False, True], ids=["beside grpcio", "runtime"])
def test_it_is_told_once_that_all_memory_is_kept(
    caplog: pytest.LogCaptureFixture, runtime: bool
) -> None:
    server = rpc.server(ThreadPoolExecutor(2), runtime=runtime, patience_s=0.05)
    coders = rpc.Tensor.FromString, rpc.Tensor.SerializeToString
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: one(), *coders)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", {"one": answer}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def one() -> Any:
        return rpc.tensor(np.ones(1 << 20, np.uint8))

    with (
        rpc.insecure_channel(f"127.0.0.1:{port}", runtime=runtime, pool_bytes=8 << 20) as channel,
        caplog.at_level(logging.WARNING),
    ):
        method = channel.unary_unary("/t/one", rpc.Tensor.SerializeToString, rpc.Tensor.FromString)
        kept = [method(rpc.Tensor(), timeout=20) for _ in range(12)]
        assert all(rpc.array(each).sum() == 1 << 20 for each in kept)
    server.stop(None).wait()
    (told,) = [each for each in caplog.records if "travels in gRPC" in each.getMessage()]
    assert told.name == "tensorwire.rpc"
    assert f"pool_bytes: {8 << 20} there" in told.getMessage()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is missing")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network namespace")
def test_a_network_of_its_own_is_another_host() -> None:
    """127.0.0.1 is somebody else there, as in a container."""
    script = "from tensorwire.rpc.negotiation import host_id; print(host_id())"
    there = subprocess.check_output(["unshare", "-n", sys.executable, "-c", script], text=True)
    assert there.strip() != host_id()
    here = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert here.strip() == host_id()


def test_a_torch_tensor_is_made_where_nobody_has_imported_torch() -> None:
    script = """
import sys
from tensorwire import rpc
message = rpc.Tensor(dtype="bfloat16", shape=[2], data=bytes([128, 63, 0, 64]))
assert "torch" not in sys.modules
assert rpc.torch_tensor(message).tolist() == [1.0, 2.0]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
