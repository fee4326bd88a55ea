"""A real Slurm on one machine: a step is a job, an allocation is not."""

from conftest import PYTHON, Run, check_done

INIT = "train(tw.init())"


def test_srun(slurm: dict[str, str], run: Run) -> None:
    check_done(run(["srun", "-n2", PYTHON], INIT, **slurm))


def test_a_process_group_at_a_port_of_the_user(slurm: dict[str, str], run: Run) -> None:
    text = """
    import torch.distributed as dist
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    job = tw.init()
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(job)
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    check_done(run(["srun", "-n2", PYTHON], text, **meeting, **slurm))


def test_an_allocation_without_a_step_is_one_process(slurm: dict[str, str], run: Run) -> None:
    text = run(["salloc", "-n2", PYTHON], "assert 'SLURM_NTASKS' in os.environ\n" + INIT, **slurm)
    assert "done 0 1 " in text
    assert text.count("done") == 1


def test_tensorwire_run_in_a_step_of_several_is_refused(slurm: dict[str, str], run: Run) -> None:
    command = ["srun", "-n2", PYTHON, "-m", "tensorwire", "run", "--workers=1"]
    assert "say that 2 processes run this command" in run(command, INIT, code=2, **slurm)
