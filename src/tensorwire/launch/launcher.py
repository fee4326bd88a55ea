"""The function that runs a job: its spec was checked, and a `RunSupervisor` does the work."""

from __future__ import annotations

from tensorwire.launch.moving_supervisor import MovingSupervisor
from tensorwire.launch.run_supervisor import RunSupervisor
from tensorwire.launch.spec import JobSpec, Patience


def run(
    job: JobSpec, *, prefix: bool = True, patience: Patience | None = None, command: str = ""
) -> int:
    """Runs a job on this host: servers, then workers; returns when all of them are gone.

    Every worker runs the command of the job and finds its place in the environment:
    TENSORWIRE_RANK, _WORKERS, _SERVERS, _SLICES, _TRANSPORTS, _SECRET, and for other libraries
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the others that torchrun sets; MASTER_PORT is free
    for `init_process_group`.
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
        job: what to run.
        prefix: whether lines begin with the name of their process.
        patience: other times than the usual ones.
        command: that started the job, for a user who goes on with it; default this process's.

    Returns:
        0 if all workers exited with 0; otherwise the exit code of the process that failed first,
        128 + n if signal n killed it or ended the job, 1 if the job could not be started.

    Raises:
        ValueError: this is not the main thread; nothing was started.
        UnavailableError: the kernel has no pidfd.
    """
    kind = MovingSupervisor if job.moves_shares else RunSupervisor
    return kind(job, prefix=prefix, patience=patience, command=command).run()
