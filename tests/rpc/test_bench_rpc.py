"""The bench of calls has a row of each system in each case."""

import pytest

from tensorwire.bench.processes import ProcessPair
from tensorwire_benchmarks import rpc, rpc_names

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wire", rpc_names.WIRES)
def test_every_case(wire: str) -> None:
    """All systems of all cases have rows, torch RPC among them; over TCP those of many processes.

    Servers have 64 attachments, and each process has those alone that it calls by.
    """
    cases = rpc_names.CASES if wire == "shm" else (f"processes{rpc_names.CLIENTS[-1]}", "channel")
    sizes = (8, 1 << 20)
    settings = rpc.RpcSettings(sizes, (wire,), cases, rounds=1, block_s=0.01, channels=40)
    report = rpc.run(settings, lambda *_: None)
    assert {(row.case, row.system) for row in report.rows} == {
        (f"{wire}.{case}", system) for case in cases for system in rpc_names.SYSTEMS[case]
    }
    assert [row for row in report.rows if not row.measured] == []
    met = {verdict.name: verdict.met for verdict in report.verdicts}
    for system in ("bytes", "runtime"):
        assert met[f"{wire} {system}, a channel for each call"] is not None
        assert (met[f"{wire} {system}, descriptors by grpcio's"] is not None) == (wire == "shm")


def test_many_requests_between_two_processes() -> None:
    """Named for a bug: a write that was done while somebody looked at it ended the client."""
    with ProcessPair("tensorwire_benchmarks.rpc_pair", {"wires": ["tcp"]}) as pair:
        assert len(pair.call("time", "tcp", "requests", "runtime", 4096, 5000)) > 0
