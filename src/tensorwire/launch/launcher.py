"""The function that runs a job: its arguments are checked, then a `RunSupervisor` does the work."""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire.launch.moving_supervisor import MovingSupervisor
from tensorwire.launch.run_supervisor import RunSupervisor
from tensorwire.launch.spec import JobSpec, Patience


def run(
    command: Sequence[str],
    *,
    workers: int,
    servers: int = 1,
    slices: int | None = None,
    transports: Sequence[str] | None = None,
    listen: str = "127.0.0.1",
    prefix: bool = True,
    full_tracebacks: bool = False,
    server_command: Sequence[str] | None = None,
    imports: Sequence[str] = (),
    durable: bool | None = None,
    restarts: int = 3,
    silence_s: float = 10.0,
    restart_workers: bool = True,
    file_workers: int = 0,
    shares: int | None = None,
    rebalance: bool = False,
    patience: Patience | None = None,
) -> int:
    """Runs a job on this host: servers, then workers; returns when all of them are gone.

    Every worker runs `command` and finds its place in the environment: TENSORWIRE_RANK, _WORKERS,
    _SERVERS, _SLICES, _TRANSPORTS, _SECRET, and for other libraries RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and the others that torchrun sets; MASTER_PORT is free for `init_process_group`.
    OMP_NUM_THREADS is set to a fair share of the cores unless it is set already; the secret is
    fresh unless TENSORWIRE_SECRET_FILE names one.

    The output of the processes comes out line by line on our stdout and stderr, with the name of
    the process in front. On a terminal worker 0 prints to it directly, so that progress bars work.
    Worker 0 also has our stdin; the others and the servers have none.

    One of the exceptions that end workers is shown with its traceback, shortened to the user's
    code, and the others with a line each; docs/launch.md has the rules.

    The first process that fails ends the job, and so does a signal (SIGINT, SIGTERM, SIGHUP), which
    is passed on to the workers; `Patience` has the times. A server or worker of a durable job that
    is killed does not end it: another process takes its place
    (docs/fault-tolerance.md). A second Ctrl-C kills at once. If the caller is killed, the kernel
    kills the job. Must be called in the main thread, whose handlers for these signals are back when
    it returns.

    Args:
        command: what follows `python`: a script, or "-m" and a module, and its arguments.
        workers: how many, at least 1.
        servers: how many, at least 1.
        slices: of a training step's samples, a multiple of `workers`; default left to the workers.
        transports: that the processes may use, of "shm", "rdma", "tcp"; default all.
        listen: host name or address on which the servers listen.
        prefix: whether lines begin with the name of their process.
        full_tracebacks: each worker prints its own traceback, whole; so does TENSORWIRE_TRACEBACKS
            with the value "full".
        server_command: the program of a server, to which its options are added; default this
            Python with `-m tensorwire.torch.server`.
        imports: modules that the servers may import for the optimizers of the script.
        durable: whether a server or worker that is killed is replaced: then processes have
            TENSORWIRE_DURABLE. This needs shm among the transports, and `listen` on loopback.
            Default: where it can be.
        restarts: the most deaths in a row of one process without progress between them, from
            which it is replaced; with 0 the job is not durable.
        silence_s: how long a process of a durable job may be stopped (SIGSTOP, a frozen cgroup)
            before it is killed and replaced; 0: for ever.
        restart_workers: whether another process runs the script in the place of a worker that was
            killed; else those that live compute its slices too, and workers may come and go
            (docs/elastic.md). That needs a durable job.
        file_workers: how many more workers there are whose gradients come from files
            (docs/files.md); they have the last ranks.
        shares: in how many the parameters are dealt; the number of servers can change between 1 and
            that (`tensorwire scale`). That needs a durable job. Default: servers cannot change.
        rebalance: shares move by themselves from a server whose work takes longer than the others'
            for long; then `shares` are by default four times the servers.
        patience: other times than the usual ones.

    Returns:
        0 if all workers exited with 0; otherwise the exit code of the process that failed first,
        128 + n if signal n killed it or ended the job, 1 if the job could not be started.

    Raises:
        ValueError: an argument cannot be right, or this is not the main thread; nothing was
            started.
        UnavailableError: the kernel has no pidfd.
    """
    job = JobSpec(
        tuple(command),
        workers,
        servers,
        slices,
        None if transports is None else tuple(transports),
        listen,
        full_tracebacks,
        tuple(imports),
        durable,
        restarts,
        silence_s,
        restart_workers,
        file_workers,
        shares,
        rebalance,
        *([] if server_command is None else [tuple(server_command)]),
    )
    return supervisor_of(job)(job, prefix=prefix, patience=patience).run()


def supervisor_of(job: JobSpec) -> type[RunSupervisor]:
    """Returns the class that runs a job of `tensorwire run`."""
    return MovingSupervisor if job.moves_shares else RunSupervisor
