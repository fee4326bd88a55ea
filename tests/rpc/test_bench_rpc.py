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
    systems = ("grpcio", "bytes", "tensor", "memcpy")
    assert cases == {("shm.unary", system, size) for size in (8, 1 << 20) for system in systems}
    assert all(row["seconds_median"] > 0 for row in report["rows"])
    assert len(report["comparisons"]) == 4
    met = {verdict["name"]: verdict["met"] for verdict in report["verdicts"]}
    assert met["shm bytes against grpcio's bytes, at 1 MiB"] is not None
    assert met["shm bytes against grpcio's bytes, at 64 MiB"] is None


def test_sizes_that_cannot_be() -> None:
    result = CliRunner().invoke(main, ["bench", "rpc", "--sizes", "9"])
    assert result.exit_code == 2
    assert "no multiple of 8" in result.output
