"""A server process: `python -m tensorwire.torch.server`. Started by a launcher, never by hand.

It runs no user code but that of modules which the launcher was told to import for optimizers: the
kernels are torch's, the rest is `tensorwire.parameters`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from functools import partial

import torch

from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.membership import (
    CollectiveServer,
    JobFile,
    RunningServer,
    ServerMember,
    server_name,
)
from tensorwire.memory import Node
from tensorwire.parameters import Server, most_threads

from .kernels import import_all, kernel_of, permitted_imports

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Serves one job; the exit code is 0 when all workers have left in good order."""
    parser = argparse.ArgumentParser(prog="tensorwire.torch.server", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="place among the servers, from 0")
    parser.add_argument("--workers", type=int, required=True, help="how many workers there are")
    parser.add_argument("--count", type=int, default=None, help="how many servers there are")
    parser.add_argument("--servers", default="", help="addresses of the servers before this one")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--advertise", default=None, metavar="HOST", help="how others reach it")
    parser.add_argument("--address-fd", type=int, required=True, help="where to write the address")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    parser.add_argument("--command", default="", help="what the workers run, for people")
    parser.add_argument("--import-from", metavar="FOLDER", help="where modules may be, too")
    parser.add_argument("--threads", type=int, default=0, help="for arithmetic; 0: chosen")
    options = parser.parse_args(arguments)
    # Ctrl-C is for the workers; the server leaves when they have left, or when it is told.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    if options.parent:
        _end_with(options.parent)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    threads = options.threads or most_threads()
    name = server_name(options.index)
    server: Server | None = None
    job_file: JobFile | None = None
    try:
        imports = permitted_imports()
        if imports and options.import_from:
            sys.path.append(options.import_from)
        import_all(imports)
        with Node(name, listen=options.listen, advertise=options.advertise) as node:
            member = ServerMember(options.index, options.workers, node, options.count)
            member.connect(tuple(filter(None, options.servers.split(","))))
            # Before anybody knows the address: workers look for it at once.
            collective = CollectiveServer(member) if options.index == 0 else None
            with os.fdopen(options.address_fd, "w") as channel:
                channel.write(f"{node.address}\n")
            job_file = _tell_of_job(options, node)
            member.gather()
            make_kernel = partial(kernel_of, permitted=imports)
            server = Server(member, make_kernel, threads, collective)
            if collective:
                collective.start(server.fail)
            server.run()
    except (TensorwireError, ValueError, OSError) as error:
        # In one piece: workers may write to the same place.
        sys.stderr.write(f"{name.replace('-', ' ')}: {type(error).__name__}: {error}\n")
        return 1
    finally:
        if server:
            server.join()
        if job_file:
            job_file.close()
    return 0


def _tell_of_job(options: argparse.Namespace, node: Node) -> JobFile | None:
    """Lets `tensorwire status` find the job; without that the job runs as well."""
    told = RunningServer(
        index=options.index,
        address=node.address,
        pid=os.getpid(),
        workers=options.workers,
        command=options.command,
        started=time.time(),
        secret=os.environ.get("TENSORWIRE_SECRET", ""),
        secret_file=os.environ.get("TENSORWIRE_SECRET_FILE", ""),
    )
    try:
        return JobFile(told)
    except (UnavailableError, OSError) as error:
        text = f"server {options.index}: tensorwire status will not list this job: {error}\n"
        sys.stderr.write(text)
        return None


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
