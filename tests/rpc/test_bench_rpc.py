"""The bench of calls runs, and says what it did not measure."""

import json
from pathlib import Path

from click.testing import CliRunner

from tensorwire.cli import main


def test_some_rows_of_everything(tmp_path: Path) -> None:
    file = tmp_path / "rpc.json"
    options = ["--quick", "--sizes", "8,1MiB", "--wires", "shm", "--json", str(file)]
    result = CliRunner().invoke(main, ["bench", "rpc", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    cases = {(row["case"], row["system"], row["bytes"]) for row in report["rows"]}
    systems = ("grpcio", "bytes", "tensor", "runtime", "memcpy")
    unary = {("shm.unary", system, size) for size in (8, 1 << 20) for system in systems}
    crowd = {("shm.clients16", system, 8) for system in ("grpcio", "runtime")}
    assert cases == unary | crowd
    assert all(row["seconds_median"] > 0 for row in report["rows"])
    assert len(report["comparisons"]) == 6
    met = {verdict["name"]: verdict["met"] for verdict in report["verdicts"]}
    assert met["shm bytes against grpcio's bytes, at 1 MiB"] is not None
    assert met["shm bytes against grpcio's bytes, at 64 MiB"] is None
    assert met["shm runtime, small calls against grpcio's"] is not None
    assert met["shm runtime, p99 of small calls by grpcio's"] is not None
    assert met["shm runtime, calls of 16 clients for each CPU second, by grpcio's"] is not None
    assert met["tcp runtime, p99 of small calls by grpcio's"] is None


def test_sizes_that_cannot_be() -> None:
    result = CliRunner().invoke(main, ["bench", "rpc", "--sizes", "9"])
    assert result.exit_code == 2
    assert "no multiple of 8" in result.output
