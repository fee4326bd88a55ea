"""Libraries that start processes or look for their own place among them."""

import sys
import tempfile

import pytest
from conftest import PYTHON, Run, check_done


def test_ray_train(run: Run) -> None:
    """The function of TorchTrainer; a process group is there before it is called."""
    pytest.importorskip("ray.train", reason="Ray Train is not installed: make test-engines")
    text = """
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    FOLDER = sys.argv[0].rpartition("/")[0]

    def train_function():
        with tw.init() as job:
            with open(f"{FOLDER}/{job.rank}", "w") as file:
                file.write(train(job))

    if __name__ == "__main__":
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["FOLDER"])
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
        storage = RunConfig(storage_path=os.environ["FOLDER"])
        TorchTrainer(train_function, scaling_config=scaling, run_config=storage).fit()
        print(*(open(f"{FOLDER}/{rank}").read() for rank in range(2)), sep="\\n")
    """
    # Its sockets are there, whose names must be short.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        check_done(run([PYTHON], text, FOLDER=folder, RAY_USAGE_STATS_ENABLED="0"))


@pytest.mark.parametrize("order", ["Accelerator first", "job first"])
def test_accelerate_under_tensorwire_run(run: Run, order: str) -> None:
    """Accelerate takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and opens a process group."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-engines")
    lines = ["accelerator = Accelerator(cpu=True)", "job = tw.init()"]
    first, second = lines if order == "Accelerator first" else lines[::-1]
    text = f"""
    from accelerate import Accelerator
    {first}
    {second}
    assert (accelerator.process_index, accelerator.num_processes) == (job.rank, job.size)
    accelerator.wait_for_everyone()
    train(job)
    accelerator.end_training()
    """
    command = [sys.executable, "-m", "tensorwire", "run", "--workers=2", "--no-prefix"]
    check_done(run(command, text))


def test_lightning_fabric(run: Run) -> None:
    pytest.importorskip("lightning.fabric", reason="Lightning is not installed: make test-engines")
    text = """
    from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    train(tw.init())
    """
    check_done(run([PYTHON], text))
