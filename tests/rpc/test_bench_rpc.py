"""The bench of calls has a row of each system in each case."""

import pytest

from tensorwire_benchmarks import rpc, rpc_names

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wire", rpc_names.WIRES)
def test_every_case(wire: str) -> None:
    """All systems of all cases have rows; over TCP those of fresh channels."""
    cases = rpc_names.CASES if wire == "shm" else ("channel",)
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
