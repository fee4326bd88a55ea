"""Real models of the bench, trained by two processes on one GPU: whose bits they have."""

import pytest

from tensorwire_benchmarks.gpu_training import BATCHES, GpuSettings, run, trained

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("model", BATCHES)
def test_models_have_one_result(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server and two give the same bits; DistributedDataParallel's are within rounding."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = GpuSettings(models=[model], steps=3)
    ddp = trained("ddp", 0, settings, deterministic=True)
    one = trained("tensorwire", 1, settings, deterministic=True)
    two = trained("tensorwire", 2, settings, deterministic=True)
    assert len({each[model]["digest"] for each in [*one, *two]}) == 1
    assert one[0][model]["values"] == pytest.approx(ddp[0][model]["values"], rel=1e-5, abs=1e-6)


def test_on_a_gpu_every_side_has_a_row() -> None:
    report = run(GpuSettings(["alexnet"], 2), lambda *_: None)
    assert [row.system for row in report.rows if row.measured] == [
        "one process", "ddp-gloo", "tensorwire, 1 server", "tensorwire, 2 servers",
    ]  # fmt: skip
    assert [item.rival for item in report.comparisons] == ["ddp-gloo"] * 2
