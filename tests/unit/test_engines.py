"""The variables that engines set for a process that they have started with others."""

from pathlib import Path

import pytest

from tensorwire.jobs.engines import (
    _SIGNS,
    Start,
    _first_host,
    explicit_start,
    find_cluster_start,
    find_start,
    without_ranks,
)

TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.b", "MASTER_PORT": "29500"}
# As srun of Slurm 22.05 sets them.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1190461441",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def found(environ: dict[str, str]) -> Start:
    start = find_start(environ)
    assert start is not None
    return start


def test_torchrun_and_all_that_set_the_same() -> None:
    start = found(TORCH)
    assert (start.rank, start.workers, start.host, start.port) == (1, 2, "a.b", 29500)
    assert not start.kept
    more = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    again = found({**TORCH, **more, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.kept
    assert len({start.job, found({**TORCH, **more}).job, again.job}) == 3


def test_a_step_of_slurm() -> None:
    start = found(SLURM)
    assert (start.rank, start.workers, start.host) == (3, 4, "gpu07")
    assert 20000 <= start.port < 30000
    others = {**SLURM, "SLURM_PROCID": "0"}
    assert (found(others).host, found(others).port) == (start.host, start.port)
    assert found({**SLURM, "SLURM_STEP_ID": "1"}).port != start.port
    assert found({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).host == "127.0.0.1"
    user = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "4"}
    assert found({**SLURM, **user}).address == "10.0.0.1:1234"


def test_an_allocation_of_slurm_is_no_step() -> None:
    """The shells of salloc and sbatch: one process, although SLURM_NTASKS is of the allocation."""
    allocation = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a"}
    assert find_start(allocation) is None
    assert find_start({**allocation, "SLURM_PROCID": "0"}) is None
    interactive = {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_start({**allocation, **interactive}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("gpu[07-09,12],big", "gpu07"),
        ("r[1-2]n[00-10].x", "r1n00.x"),
        ("a,b", "a"),
        ("", ""),
    ],
)
def test_the_first_host(hosts: str, first: str) -> None:
    assert _first_host(hosts) == first


def test_mpi() -> None:
    start = found(OPEN_MPI)
    assert (start.rank, start.workers, start.host) == (1, 2, "127.0.0.1")
    assert found({**OPEN_MPI, "PMIX_NAMESPACE": "5"}).port != start.port
    assert found({**MPICH, "MASTER_PORT": "29500"}).address == "127.0.0.1:29500"


def test_what_is_inside_counts() -> None:
    """Under Slurm the daemons of mpirun are a step, one per host; torchrun may be in one too."""
    one = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": "5"}
    assert found({**one, **OPEN_MPI}).told_by.startswith("OMPI_COMM_WORLD_RANK")
    assert found({**one, **OPEN_MPI, **TORCH}).told_by == "RANK and WORLD_SIZE"
    assert find_start({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}) is None
    pmi2 = {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}  # srun --mpi=pmi2
    assert found(pmi2).host == "gpu07"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCH, "MASTER_ADDR": ""}, "RANK and WORLD_SIZE say .* MASTER_ADDR is not set: set"),
        ({**TORCH, "MASTER_PORT": ""}, "MASTER_PORT is not set: set"),
        ({**TORCH, "RANK": "2"}, "RANK is '2', not a number from 0 to 1"),
        ({**TORCH, "MASTER_PORT": "0"}, "MASTER_PORT is '0', not a number from 1 to 65535"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE hints .* tw\.init\(rank=…, world_size=…\)"),
        ({"RANK": "0"}, "RANK hints"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR hints .* call init_process_group before"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, "PMIX_RANK hints"),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1 and OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_SIZE hints"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_SIZE hints"),
        ({"PMI_RANK": "1"}, "PMI_RANK hints"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_PROCID hints"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK hints at other workers of torchrun"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE hints"),
        ({"GROUP_WORLD_SIZE": "4"}, "GROUP_WORLD_SIZE hints"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE hints .* of Flux .*=4"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "FLUX_JOB_SIZE": "4"}, "FLUX"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE hints"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID hints"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE hints"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX hints .* set RANK, WORLD_SIZE"),
        ({**SLURM, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8 and SLURM_PROCID .* 4 workers"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_PROCID .* MASTER_ADDR is not set: export"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "worker 1 of 2.*mpirun -x MASTER_ADDR"),
        (MPICH, "worker 1 of 2.*mpiexec -genv"),
    ],
)
def test_what_is_missing_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_start(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "3"},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_SIZE": "4"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "FLUX_JOB_SIZE": "1", "PALS_RANKID": "0"},
        {**SLURM, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_alone(environ: dict[str, str]) -> None:
    assert find_start(environ) is None


def test_a_program_that_knows_its_rank() -> None:
    start = explicit_start({"MASTER_ADDR": "a", "MASTER_PORT": "5"}, 1, 3)
    assert (start.rank, start.workers, start.address) == (1, 3, "a:5")
    assert explicit_start({}, 0, 1).workers == 1
    with pytest.raises(ValueError, match=r"world_size .* MASTER_ADDR is not set"):
        explicit_start({}, 0, 2)
    with pytest.raises(ValueError, match="rank 2 is not one of the ranks of world_size 2"):
        explicit_start({}, 2, 2)


def test_servers_and_other_jobs_get_no_ranks() -> None:
    kept = {"PATH": "/bin", "TENSORWIRE_SECRET": "x", "SLURM_JOB_ID": "7"}
    assert without_ranks({**TORCH, **kept, "TENSORWIRE_RANK": "0", "LOCAL_RANK": "0"}) == kept


def test_the_page_names_every_variable(repository: Path) -> None:
    page = (repository / "docs" / "launchers.md").read_text()
    names = {*TORCH, *OPEN_MPI, *MPICH, "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}
    names |= {name for _, *variables in _SIGNS for name in variables}
    assert not [name for name in names if name not in page]


def test_clusters_alone() -> None:
    assert find_cluster_start(TORCH) is None
    assert find_cluster_start(SLURM) is not None
