"""Starts the processes of a job on this host and sees to it that they end together.

`run` with a `JobSpec` is all that most callers need; the command `tensorwire run` is the same with
options. This layer knows processes, pipes and signals; of tensorwire it knows the names of the
variables that a process reads when it joins the job.
"""

from tensorwire.launch.launcher import run
from tensorwire.launch.serve import RETURN_S, ServeSupervisor, serve_spec
from tensorwire.launch.silence import is_stopped
from tensorwire.launch.spec import JobSpec, Patience
from tensorwire.launch.supervisor import Supervisor

__all__ = [
    "RETURN_S",
    "JobSpec",
    "Patience",
    "ServeSupervisor",
    "Supervisor",
    "is_stopped",
    "run",
    "serve_spec",
]
