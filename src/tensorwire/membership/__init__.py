"""Knows the members of a job and how they reach each other; no parameters and no torch."""

from .asking import ScaleError, ask_launcher, proof_of, secret_of
from .claim import drop_claim, hold_claim, refusal
from .collective import Collective, CollectiveServer, FollowingCollective
from .descriptor_store import LISTENER, DescriptorStore, Takeover
from .durable_memory import DurableMemory, open_node
from .engines import (
    MAX_WORKERS,
    Start,
    explicit_start,
    find_cluster_start,
    find_start,
    torch_job,
    without_ranks,
)
from .entry import PEER_CREDENTIALS, SUPERVISOR, enter_job
from .history import History, NoteKind
from .identity import (
    CONTROL,
    CONTROL_BYTES,
    FAREWELL,
    GOODBYE,
    LOOPBACK,
    LOST_MEMBER_CODE,
    boot_id,
    called,
    check_name,
    listed,
    lost,
    pid_namespace,
    server_name,
    this_host,
    turn_away,
    was_never_there,
)
from .job_file import (
    JobFile,
    RunningFileWorker,
    RunningServer,
    running_file_workers,
    running_servers,
    shown_command,
)
from .job_log import JOB_LOG, JobLog, LoggedJob, LoggedMember, logged_jobs, note_in_job_log
from .lockfile import is_there, remove_own, tell, try_lock
from .reading_secret import job_secret, reading_secret
from .runtime import cache_folder, runtime_folder
from .server import OfWorkers, ServerMember
from .status import DOCTOR, StatusRegion, read_status, reader_name
from .takeovers import ChangeWord, PlannedChange, Takeovers, deal_places
from .unix_sockets import listen_in, short_path
from .worker import WorkerMember
from .world import RANK, SHARES_MOVE, SLICES, World

__all__ = [
    "CONTROL",
    "CONTROL_BYTES",
    "DOCTOR",
    "FAREWELL",
    "GOODBYE",
    "JOB_LOG",
    "LISTENER",
    "LOOPBACK",
    "LOST_MEMBER_CODE",
    "MAX_WORKERS",
    "PEER_CREDENTIALS",
    "RANK",
    "SHARES_MOVE",
    "SLICES",
    "SUPERVISOR",
    "ChangeWord",
    "Collective",
    "CollectiveServer",
    "DescriptorStore",
    "DurableMemory",
    "FollowingCollective",
    "History",
    "JobFile",
    "JobLog",
    "LoggedJob",
    "LoggedMember",
    "NoteKind",
    "OfWorkers",
    "PlannedChange",
    "RunningFileWorker",
    "RunningServer",
    "ScaleError",
    "ServerMember",
    "Start",
    "StatusRegion",
    "Takeover",
    "Takeovers",
    "WorkerMember",
    "World",
    "ask_launcher",
    "boot_id",
    "cache_folder",
    "called",
    "check_name",
    "deal_places",
    "drop_claim",
    "enter_job",
    "explicit_start",
    "find_cluster_start",
    "find_start",
    "hold_claim",
    "is_there",
    "job_secret",
    "listed",
    "listen_in",
    "logged_jobs",
    "lost",
    "note_in_job_log",
    "open_node",
    "pid_namespace",
    "proof_of",
    "read_status",
    "reader_name",
    "reading_secret",
    "refusal",
    "remove_own",
    "running_file_workers",
    "running_servers",
    "runtime_folder",
    "secret_of",
    "server_name",
    "short_path",
    "shown_command",
    "tell",
    "this_host",
    "torch_job",
    "try_lock",
    "turn_away",
    "was_never_there",
    "without_ranks",
]
