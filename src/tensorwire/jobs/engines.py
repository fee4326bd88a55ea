"""Reads from an engine's variables this process's rank and where workers meet. Pure.

An engine has started this process with others: torchrun and all that set the same variables
(Ray Train, Accelerate, Kubeflow, a person), Open MPI, MPICH and Intel MPI, Slurm. docs/launchers.md
lists the variables. Knows no torch and starts nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_WORKERS = 1 << 16
_PORTS = range(20000, 30000)  # below those that kernels give away by themselves

TORCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""The variables that torchrun sets for every worker, without the ones for torchrun itself."""

_SIGNS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("MPI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIx", "PMIX_RANK", ""),
    ("torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS", "PALS_RANKID", ""),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("a Kubernetes Job", "JOB_COMPLETION_INDEX", ""),
)
"""Engine, its rank, its number of processes. A rank other than 0 and a number other than 1 say that
there are others, also where that is not enough to find them."""
_CLUSTERS = ("Open MPI", "MPI", "Slurm", "PMIx")

_PLACES = tuple(f"TENSORWIRE_{name}" for name in ("RANK", "WORKERS", "SERVERS", "SUPERVISOR"))
_ALONE = "tw.init(rank=0, world_size=1) if this process is to train alone"


@dataclass(frozen=True, slots=True)
class Start:
    """One worker of several, as its engine has told it.

    Attributes:
        rank: 0 to workers - 1.
        workers: how many.
        told_by: the variables that say so, for messages.
        host: where all can reach worker 0.
        port: of the store that worker 0 keeps there.
        job: the same for all workers of this start, and another one for every other start.
        kept: somebody else keeps the store already, as torchrun's agent does.
    """

    rank: int
    workers: int
    told_by: str
    host: str = "127.0.0.1"
    port: int = 0
    job: str = ""
    kept: bool = False

    @property
    def address(self) -> str:
        """The address where the workers meet, for messages."""
        return f"{self.host}:{self.port}"


def find_start(environ: Mapping[str, str]) -> Start | None:
    """Returns the start by the variables of engines; None for a process that is alone.

    RANK with WORLD_SIZE counts before MPI's variables, and these before Slurm's: the innermost
    engine counts. Variables of an allocation of Slurm outside of `srun` say nothing.

    Raises:
        ValueError: a variable says that there are others, and something is missing or makes no
            sense; the message names it and what to do.
    """
    start = _torch(environ)
    if start is not None and start.workers == 1:
        _check_mpi_agrees(environ)
        return None
    start = start or find_cluster_start(environ)
    if start is None or start.workers == 1:
        _check_nobody_else(environ, start)
    if start is not None and "RANK" not in environ and "WORLD_SIZE" in environ:
        told = number("WORLD_SIZE", environ["WORLD_SIZE"], 1, MAX_WORKERS)
        if told != start.workers:
            raise ValueError(
                f"WORLD_SIZE is {told} and {start.told_by} say {start.workers} workers; start as "
                f"many, or unset WORLD_SIZE; {_ALONE}"
            )
    return None if start is None or start.workers == 1 else start


def find_cluster_start(environ: Mapping[str, str]) -> Start | None:
    """Returns the start by the variables of MPI or Slurm; None without them.

    Raises:
        ValueError: as for `find_start`.
    """
    return _open_mpi(environ) or _pmi(environ) or _slurm(environ)


def explicit_start(environ: Mapping[str, str], rank: int, workers: int) -> Start:
    """Returns the start that a program names itself; it meets at MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: these are not set, or rank and workers make no sense.
    """
    told_by = "the arguments rank and world_size"
    for name, value in (("rank", rank), ("world_size", workers)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} is a whole number, not {value!r}")
    if not 1 <= workers <= MAX_WORKERS or not 0 <= rank < workers:
        raise ValueError(f"rank {rank} is not one of the ranks of world_size {workers}")
    if workers == 1:
        return Start(0, 1, told_by)
    host, port = _meeting_point(environ, told_by)
    return Start(rank, workers, told_by, host, port, torch_job(environ))


def torch_job(environ: Mapping[str, str]) -> str:
    """Returns `Start.job` for torch's variables; torchrun's store outlives a restart."""
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"torch/{run}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a process that is no worker, such as a server."""
    return {
        name: value
        for name, value in environ.items()
        if name not in TORCH_VARIABLES
        and name not in _PLACES
        and not name.startswith(("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_RANK", "PMI_SIZE"))
    }


def number(name: str, text: str, low: int, high: int) -> int:
    """Returns the value of a variable.

    Raises:
        ValueError: it is no number from low to high.
    """
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"{name} is {text!r}, not a number from {low} to {high}")
    return value


def _torch(environ: Mapping[str, str]) -> Start | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    told_by = "RANK and WORLD_SIZE"
    rank, workers = _rank_and_workers(environ, "RANK", "WORLD_SIZE")
    if workers == 1:
        return Start(0, 1, told_by)
    host, port = _meeting_point(environ, told_by)
    kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Start(rank, workers, told_by, host, port, torch_job(environ), kept)


def _open_mpi(environ: Mapping[str, str]) -> Start | None:
    names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if not all(name in environ for name in names):
        return None
    rank, workers = _rank_and_workers(environ, *names)
    told_by = " and ".join(names)
    one_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(workers)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    how = "start with mpirun -x MASTER_ADDR=HOST, the host of rank 0"
    return _cluster_start(environ, rank, workers, told_by, f"mpi/{job}", one_host, bool(job), how)


def _pmi(environ: Mapping[str, str]) -> Start | None:
    names = "PMI_RANK", "PMI_SIZE"
    if not all(name in environ for name in names):
        return None
    rank, workers = _rank_and_workers(environ, *names)
    slurm = _slurm(environ)
    if slurm is not None and (slurm.rank, slurm.workers) == (rank, workers):
        return slurm  # srun --mpi=pmi2, which knows the hosts
    told_by = " and ".join(names)
    one_host = environ.get("MPI_LOCALNRANKS") == str(workers)
    how = "start with mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500, the host of rank 0"
    # These tell nothing by which two starts on one host could be told apart.
    return _cluster_start(environ, rank, workers, told_by, "pmi", one_host, False, how)


def _slurm(environ: Mapping[str, str]) -> Start | None:
    # Without a step this is the shell of an allocation, which is one process.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if tasks not in environ:
        return None
    rank, workers = _rank_and_workers(environ, "SLURM_PROCID", tasks)
    names = "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
    job = "/".join(["slurm", *(environ.get(name, "") for name in names)])
    one_host = environ.get("SLURM_STEP_NUM_NODES") == "1"
    first = _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    told_by = f"SLURM_PROCID and {tasks}"
    how = "export MASTER_ADDR, the host of task 0, before srun"
    return _cluster_start(environ, rank, workers, told_by, job, one_host, True, how, first)


def _cluster_start(
    environ: Mapping[str, str],
    rank: int,
    workers: int,
    told_by: str,
    job: str,
    one_host: bool,
    has_job: bool,
    how: str,
    first_host: str = "",
) -> Start:
    """Returns a start at the user's meeting point, else on the first host at a port of the job."""
    if workers == 1:
        return Start(0, 1, told_by)
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else first_host)
    text = environ.get("MASTER_PORT", "")
    missing = "MASTER_ADDR" if not host else "" if text or has_job else "MASTER_PORT"
    if missing:
        raise ValueError(
            f"{told_by} say that this is worker {rank} of {workers}, but not where the workers can "
            f"meet, and {missing} is not set: {how}; {_ALONE}"
        )
    port = number("MASTER_PORT", text, 1, 65535) if text else _port_of(job)
    return Start(rank, workers, told_by, host, port, job)


def _rank_and_workers(environ: Mapping[str, str], rank: str, workers: str) -> tuple[int, int]:
    count = number(workers, environ[workers], 1, MAX_WORKERS)
    return number(rank, environ[rank], 0, count - 1), count


def _meeting_point(environ: Mapping[str, str], told_by: str) -> tuple[str, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"{told_by} say that there are other workers and {name} is not set: set "
                "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it; "
                f"{_ALONE}"
            )
    return environ["MASTER_ADDR"], number("MASTER_PORT", environ["MASTER_PORT"], 1, 65535)


def _check_nobody_else(environ: Mapping[str, str], start: Start | None) -> None:
    """Raises ValueError if a variable hints at other workers: each would train a model of its own.

    This happens where a script names its rank to `init_process_group` alone.

    Args:
        environ: the variables.
        start: an engine that says that this process is alone; another one may be inside of it.
    """
    # Slurm may have started mpiexec: its variables are still there.
    without = () if start is None else _CLUSTERS
    signs = [
        (name, engine)
        for engine, rank, size in _SIGNS
        if engine not in without
        for name, harmless in ((size, "1"), (rank, "0"))
        if environ.get(name, harmless) not in (harmless, "")
    ]
    if start is None and environ.get("WORLD_SIZE", "") != "1":
        said = ["WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"]
        said += ["PMIX_RANK"] if "PMIX_NAMESPACE" in environ else []
        signs = [*((name, "") for name in said if environ.get(name)), *signs]
    if signs:
        name, engine = signs[0]
        whose = f" of {engine}" if engine else ""
        raise ValueError(
            f"{name} hints at other workers{whose} ({name}={environ[name]}), but nothing that "
            "tensorwire knows says which one this is and how many there are: set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, or call init_process_group before tw.init(), or "
            f"tw.init(rank=…, world_size=…); {_ALONE}"
        )


def _check_mpi_agrees(environ: Mapping[str, str]) -> None:
    """Raises ValueError if RANK and WORLD_SIZE say that one is alone, and Open MPI does not.

    Inside a step of Slurm or a worker of torchrun they count: these start what starts others too.
    """
    name = "OMPI_COMM_WORLD_SIZE"
    if environ.get(name, "1") != "1" and "TORCHELASTIC_RUN_ID" not in environ:
        raise ValueError(
            f"WORLD_SIZE is 1 and {name} is {environ[name]}: unset RANK and WORLD_SIZE to train "
            f"with the others, or call {_ALONE}"
        )


def _port_of(job: str) -> int:
    """Returns a port that is the same on all hosts, and rarely the port of another job."""
    digest = hashlib.sha256(job.encode()).digest()
    return _PORTS[int.from_bytes(digest[:4], "little") % len(_PORTS)]


def _first_host(hosts: str) -> str:
    """Returns the first host of a list as Slurm writes it: "gpu07" of "gpu[07-09,12],big"."""
    match = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0]) if match else ""
