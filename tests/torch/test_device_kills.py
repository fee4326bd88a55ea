"""Workers and servers are killed while a model on a device trains: the bits stay the same.

The script comes from test_killed_workers.py, with its models on the device. Without a CUDA device
tensors of the CPU are treated as if they were on one.
"""

from pathlib import Path

import pytest
from test_killed_workers import SCRIPT, SEVERAL, run

ON_DEVICE = SCRIPT.replace("numpy()", "cpu().numpy()")
for before, after in {
    "job = tw.init(seed=3)\n": (
        "job = tw.init(seed=3)\n"
        "dev = torch.device('cpu' if os.environ.get('TENSORWIRE_STAGE_CPU') else 'cuda')\n"
        "torch.use_deterministic_algorithms(True)\n"
    ),
    "nn.Linear(300, 5))\n": "nn.Linear(300, 5)).to(dev)\n",
    "other = nn.Linear(20, 5)\n": "other = nn.Linear(20, 5).to(dev)\n",
    "    a = a + 0.01 * random": "    a, b = a.to(dev), b.to(dev)\n        a = a + 0.01 * random",
    "F.cross_entropy(other(a), b)": "F.cross_entropy(other(a.to(dev)), b.to(dev))",
    "model(x).argmax(1)": "model(x.to(dev)).argmax(1).cpu()",
}.items():
    assert ON_DEVICE.count(before) == 1, before
    ON_DEVICE = ON_DEVICE.replace(before, after)

# Of workers and servers: beside a commit, a result, a change of a cell, a version.
KILLS = [
    "worker-0:commit.noted:6:kill,server-0:cell.changed:30:kill",
    "worker-1:gradients.sent:13:kill,worker-0:result.come:14:kill",
    "server-1:version.published:20:kill,server-0:cell.armed:9:kill",
    "worker-1:commit.begun:3:kill,worker-0:position.noted:14:kill",
    "server-0:cell.changed:9:kill,worker-1:commit.sent:21:kill",
]
MORE = [
    "worker-0:commit.noted:1:kill,worker-1:commit.noted:20:kill",
    "server-1:version.published:7:kill,server-0:cell.changed:33:kill",
    "worker-0:gradients.sent:1:kill,server-0:cell.armed:25:kill",
    "worker-1:result.noted:3:kill,worker-0:result.noted:15:kill",
    "server-0:cell.done:12:kill,worker-1:position.noted:26:kill",
]


def test_the_kills_are_twenty() -> None:
    assert sum(line.count(":kill") for line in KILLS + MORE) == 20


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The result where nothing is killed and nothing is copied."""
    found, _ = run(tmp_path_factory.mktemp("undisturbed") / "job", SCRIPT, "", "--servers", "2")
    assert len(found) == 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fail", KILLS[:3])
def test_a_staged_job_goes_on(
    fail: str, tmp_path: Path, staged: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORWIRE_STAGE_CPU", "1")
    digests, said = run(tmp_path / "job", ON_DEVICE, fail, "--servers", "2")
    assert said.count("(restart 1)") == 2, said
    assert digests == staged


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gradients_that_a_killed_worker_left_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: its successor copied what it computed anew over what counts."""
    whole, _ = run(tmp_path / "undisturbed", SEVERAL, "")
    monkeypatch.setenv("TENSORWIRE_STAGE_CPU", "1")
    for fail in ("worker-1:commit.sent:156:kill", "worker-0:commit.noted:157:kill"):
        digests, said = run(tmp_path / fail[-8:-5], SEVERAL, fail)
        assert said.count("is started again as pid ") == 1, said
        assert digests == whole, fail


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        folder = tmp_path_factory.mktemp("undisturbed") / "job"
        found, _ = run(folder, ON_DEVICE, "", "--servers", "2")
    assert len(found) == 1
    return found


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("fail", KILLS + MORE)
def test_a_job_on_a_gpu_goes_on(
    fail: str, tmp_path: Path, on_gpu: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    digests, said = run(tmp_path / "job", ON_DEVICE, fail, "--servers", "2")
    assert said.count("(restart 1)") == 2, said
    assert digests == on_gpu
