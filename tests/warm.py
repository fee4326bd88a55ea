"""Starts the Python processes of the tests as forks of one that has imported torch.

A small worker takes three seconds of CPU, nearly all of it for the import of torch. Here one
process per process of pytest, the nursery, imports it, and `subprocess.Popen` has a command such as
`python SCRIPT` or `python -m MODULE` forked by it. It gets the arguments, environment, folder,
descriptors and limits that it would have got, and is a child of the process that asked: it is
waited for, killed and ended with its parent as any other. A launcher of workers gets a nursery
of its own, forked when it begins. A command whose process would differ (other flags of Python,
LD_PRELOAD, another network namespace, ...) is started as ever, and so is every command of a test
that is marked `cold`, or where the kernel does not let a process show other arguments in /proc.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import io
import mmap
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

COLD = "TENSORWIRE_TESTS_COLD"
# The nursery imports these; some machines are too slow for all.
MODULES = os.environ.get(
    "TENSORWIRE_TESTS_MODULES", "numpy torch torch._dynamo torch.utils.data"
).split()
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_CLONE_PARENT, _CLONE_CHILD_SETTID = 0x8000, 0x1000000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
# Libraries read variables that begin so when they are loaded: the nursery must have the same.
_READ_AT_LOAD = (
    *("CUDA", "DNNL", "GLIBC", "GOMP", "KMP", "LANG", "LC", "LD", "MALLOC", "MKL", "NUMPY", "OMP"),
    *("OPENBLAS", "PYTHON", "PYTORCH", "TORCH", "TZ"),
)
_FOLLOWED = {
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER",
    "OMP_NUM_THREADS",
}  # fmt: skip
_LARGEST_REQUEST, _MOST_DESCRIPTORS = 100_000, 200
_LAUNCHERS = (("tensorwire", "run"), ("torch.distributed.run", ""))


@dataclass
class Command:
    """A Python process that is to be; everything of it but its descriptors.

    Attributes:
        arguments: `sys.orig_argv`.
        kind: "script", "module" or "code".
        what: the script's path, the module's name, or the code.
        argv: the arguments that follow it.
        unbuffered: `-u`.
        safe_path: `-P`.
        tied_to: its parent's pid, if it ends with its parent; else 0.
        open_files: (soft, hard) limit of open files.
    """

    arguments: list[str]
    kind: str
    what: str
    argv: list[str]
    unbuffered: bool = False
    safe_path: bool = False
    tied_to: int = 0
    open_files: tuple[int, int] = (0, 0)
    environment: dict[bytes, bytes] | None = None
    folder: bytes = b""
    new_session: bool = False
    process_group: int = -1
    cores: set[int] | None = None
    nice: int = 0
    numbers: tuple[int, ...] = ()  # the descriptors that it gets, by their numbers in it

    @property
    def is_launcher(self) -> bool:
        first = self.argv[0] if self.argv else ""
        return self.kind == "module" and any(
            self.what == module and verb in ("", first) for module, verb in _LAUNCHERS
        )


@functools.cache
def child_script() -> str:
    """Returns the path of launch/child.py, found without an import of tensorwire."""
    package = importlib.util.find_spec("tensorwire")
    assert package is not None
    assert package.origin is not None
    return str(Path(package.origin).parent / "launch" / "child.py")


def parse(arguments: Sequence[Any]) -> Command | None:
    """Reads a command line of Python; None if it is another program's, or has other options."""
    words = [os.fsdecode(word) for word in arguments]
    tied_to, open_files = 0, resource.getrlimit(resource.RLIMIT_NOFILE)
    if words[:4] == [sys.executable, "-I", "-S", child_script()]:  # it turns into the rest
        tied_to, open_files, words = int(words[4]), (int(words[5]), open_files[1]), words[6:]
    if not words or words[0] != sys.executable:
        return None
    given = {"tied_to": tied_to, "open_files": open_files, "arguments": words}
    options = {"-u": "unbuffered", "-P": "safe_path"}
    kinds = {"-m": "module", "-c": "code"}
    for place, word in enumerate(words[1:], 1):
        if word in options:
            given[options[word]] = True
        elif word in kinds and len(words) > place + 1:
            return Command(
                kind=kinds[word], what=words[place + 1], argv=words[place + 2 :], **given
            )
        elif word.startswith("-"):
            return None
        else:
            return Command(kind="script", what=word, argv=words[place + 1 :], **given)
    return None


def _place() -> list[str]:
    """Returns where this thread is: a process forked elsewhere would be in another place."""
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    return [
        *(os.readlink(f"/proc/thread-self/ns/{kind}") for kind in kinds),
        Path("/proc/thread-self/cgroup").read_text(),
        Path("/proc/thread-self/oom_score_adj").read_text(),
        repr((os.getresuid(), os.getresgid(), os.getgroups())),
        repr([resource.getrlimit(limit) for limit in range(16) if limit != resource.RLIMIT_NOFILE]),
        repr(sorted(number for number in signal.valid_signals() if _is_ignored(number))),
    ]


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_IGN


class Nursery:
    """Asks a nursery for processes; one per process that starts others. Thread-safe."""

    def __init__(self, connection: socket.socket, ready: dict[str, Any] | None = None) -> None:
        self._connection = connection
        self._told = ready
        self._lock = threading.Lock()

    @property
    def _ready(self) -> dict[str, Any]:
        """Waits until the nursery has imported everything; returns what it says of itself."""
        with self._lock:
            if self._told is None:
                told = self._connection.recv(1_000_000)
                self._told = pickle.loads(told) if told else {"place": None}  # it told its error
            return self._told

    @property
    def forks(self) -> bool:
        """True if processes can be forked here; they are started as ever otherwise."""
        return self._ready["place"] is not None

    def start(
        self,
        arguments: Sequence[Any],
        environment: Mapping[Any, Any] | None,
        folder: Any,
        standard: Sequence[int],
        inherited: Sequence[int],
        new_session: bool,
        process_group: int,
    ) -> int | None:
        """Has a process forked that runs a command.

        Returns:
            Its pid, of a child of this process; None if it would not be what the command gives.
        """
        command = parse(arguments)
        if command is None:
            return None
        given = os.environ if environment is None else environment
        variables = {os.fsencode(name): os.fsencode(value) for name, value in given.items()}
        if _place() != self._ready["place"] or not self._are_followed(variables):
            return None
        command.environment = variables
        command.folder = os.fsencode(os.path.abspath(os.curdir if folder is None else folder))
        command.new_session, command.process_group = new_session, process_group
        command.cores, command.nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
        command.numbers = (0, 1, 2, *inherited)
        descriptors = [at if end == -1 else end for at, end in enumerate(standard)] + list(
            inherited
        )
        request = pickle.dumps(command)
        if len(request) > _LARGEST_REQUEST or len(descriptors) > _MOST_DESCRIPTORS:
            return None
        with self._lock:
            try:
                socket.send_fds(self._connection, [request], descriptors)
                answer = self._connection.recv(100)
            except OSError:
                return None  # one of the standard descriptors is closed, or the nursery ended
        return int(answer) if answer else None

    def _are_followed(self, variables: Mapping[bytes, bytes]) -> bool:
        """Returns whether the process reads nothing else than the nursery when it loads things."""

        def ours(names: Mapping[bytes, bytes]) -> dict[str, bytes]:
            found = {os.fsdecode(name): value for name, value in names.items()}
            return {
                name: value
                for name, value in found.items()
                if name.partition("_")[0] in _READ_AT_LOAD or name.startswith("PYTHON")
                if name not in _FOLLOWED
            }

        path = os.fsdecode(variables.get(b"PYTHONPATH", b"")).split(os.pathsep)
        others = [
            entry
            for entry in path
            if entry and os.path.abspath(entry) not in self._ready["path"]
            if any(os.path.exists(os.path.join(entry, name)) for name in ("torch", "numpy"))
        ]
        return not others and ours(variables) == ours(self._ready["environment"])

    def close(self) -> None:
        """Ends the nursery; the processes that it has forked go on."""
        self._connection.close()


# ---- in the process that starts others

_execute_child: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute_child)


installed: list[Nursery] = []


def install(nursery: Nursery) -> None:
    """Has the commands of `subprocess.Popen` forked by a nursery."""
    installed[:] = [nursery]

    def execute_child(self: subprocess.Popen[Any], *args: Any, **more: Any) -> None:
        given = _signature.bind(self, *args, **more).arguments
        if _is_plain(given):
            ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            pid = nursery.start(
                given["args"], given["env"], given["cwd"], ends, sorted(given["pass_fds"]),
                given["start_new_session"], given["process_group"],
            )  # fmt: skip
            if pid is not None:
                self.pid, self._child_created = pid, True  # type: ignore[attr-defined]
                pipes = "p2cread p2cwrite c2pread c2pwrite errread errwrite".split()
                self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]
                return
        _execute_child(self, *args, **more)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Returns whether a call asks for nothing that is not done here."""
    environment = os.environ if given["env"] is None else given["env"]
    if COLD in environment or isinstance(given["args"], (str, bytes, os.PathLike)):
        return False
    unusual = ("preexec_fn", "executable", "shell", "gids")
    return (
        given["close_fds"]
        and given["restore_signals"]
        and not any(given[name] for name in unusual)
        and given["gid"] in (None, -1)
        and given["uid"] in (None, -1)
        and given["umask"] == -1
    )


def begin_nursery() -> Nursery:
    """Starts a process that imports torch and forks others; does not wait for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = str(Path(__file__).parent)
    call = f"warm.nurse({theirs.fileno()}, {MODULES})"
    code = f"import sys; sys.path.insert(0, {folder!r}); import warm; {call}"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, COLD: "1"},
            start_new_session=True,
        )
    nursery = Nursery(ours)

    def end() -> None:
        nursery.close()
        process.kill()
        process.wait()

    atexit.register(end)
    return nursery


# ---- in the nursery


def nurse(descriptor: int, modules: Sequence[str]) -> None:
    """Imports torch and others, then forks processes until the other end of a socket is closed."""
    atexit.register(_keep_modules)
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()
    _imported.extend(sys.modules.keys() - {"__main__", "builtins", "sys"})
    _skip_destructors()
    os.environ.pop(COLD)
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    here = {str(Path(__file__).parent)}
    given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    ready = {
        "place": _place() if _SYS_CLONE and _show(sys.orig_argv, os.environb) else None,
        "environment": dict(os.environb),
        "path": set(sys.path),
    }
    base = [entry for entry in sys.path if entry not in here | given]
    child_script()
    connection.send(pickle.dumps(ready))
    _serve(connection, base, ready)


_imported: list[str] = []


def _keep_modules() -> None:
    """Saves the interpreter from taking apart what the nursery imported: most of a short life.

    The first to be registered, so the last to run.
    """
    for name in _imported:
        if (module := sys.modules.pop(name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _skip_destructors() -> None:
    """Has the process end before the destructors of torch's libraries, which take 0.15 s.

    Libraries that a process loads itself are destroyed as ever, before that.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _serve(connection: socket.socket, base: list[str], ready: Any) -> None:
    """Forks processes; returns in this process alone, when the other end is closed."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(
            connection, _LARGEST_REQUEST + 1, _MOST_DESCRIPTORS
        )
        if not request:
            return
        command = pickle.loads(request)
        if (pid := _fork_for_the_parent()) == 0:
            connection.close()
            del connection
            _become(command, descriptors, base, ready)
        for each in descriptors:
            os.close(each)
        connection.send(str(pid).encode())


class _MemoryMap(ctypes.Structure):
    """The `prctl_mm_map` of Linux: where /proc reads a process's arguments and environment."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code end_code start_data end_data start_brk brk start_stack "
                "arg_start arg_end env_start env_end auxv"
            ).split()
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


_shown: list[mmap.mmap] = []


def _show(arguments: Sequence[str], environment: Mapping[bytes, bytes]) -> bool:
    """Has /proc show these of this process. Returns whether this kernel lets it."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    stat = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    numbers = {
        "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46,
        "start_brk": 47,
    }  # fmt: skip
    words = b"".join(os.fsencode(word) + b"\0" for word in arguments)
    variables = b"".join(b"%s=%s\0" % pair for pair in environment.items())
    memory = mmap.mmap(-1, len(words + variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    _shown[:] = [memory]
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle = start + len(words)
    shown = _MemoryMap(
        **{name: int(stat[number - 3]) for name, number in numbers.items()},
        brk=libc.sbrk(0), arg_start=start, arg_end=middle, env_start=middle,
        env_end=middle + len(variables), exe_fd=-1,
    )  # fmt: skip
    return bool(
        libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0) == 0
    )


_python = ctypes.PyDLL(None)


def _fork_for_the_parent() -> int:
    """Forks as `os.fork` does, but a child of this process's parent. One thread must be there.

    glibc keeps the number of each thread in a structure, which its own fork corrects in the child;
    here the kernel writes it there.
    """
    thread = threading.get_ident()  # the structure's address
    number = threading.get_native_id()
    words = (ctypes.c_int * 256).from_address(thread)
    places = [thread + 4 * at for at, word in enumerate(words) if word == number]
    _python.PyOS_BeforeFork()
    pid = _python.syscall(
        _SYS_CLONE,
        _CLONE_PARENT | _CLONE_CHILD_SETTID | signal.SIGCHLD,
        None,
        None,
        *(
            (ctypes.c_void_p(places[0]), None)
            if _SYS_CLONE == 56
            else (None, ctypes.c_void_p(places[0]))
        ),
    )
    (_python.PyOS_AfterFork_Parent if pid else _python.PyOS_AfterFork_Child)()
    return pid


def _become(command: Command, descriptors: list[int], base: list[str], ready: Any) -> None:
    """Turns into a process that runs a command; does not return."""
    _take_descriptors(descriptors, command.numbers)
    if command.new_session:
        os.setsid()
    if command.process_group >= 0:
        os.setpgid(0, command.process_group)
    if command.tied_to:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != command.tied_to:
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, command.open_files)
    os.sched_setaffinity(0, command.cores)
    os.setpriority(os.PRIO_PROCESS, 0, command.nice)
    os.environb.clear()
    os.environb.update(command.environment)
    _show(command.arguments, command.environment)
    _open_standard(command.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    try:
        os.chdir(command.folder)
    except OSError as error:
        os._exit(_complain(f"{os.fsdecode(command.folder)}: {error.strerror}"))
    if command.is_launcher:
        _fork_nursery(base, ready)
    _run(command, base)


def _complain(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    return 1


def _take_descriptors(descriptors: list[int], numbers: Sequence[int]) -> None:
    """Gives the received descriptors the numbers that they are to have, and closes all others."""
    import fcntl

    above = max(*numbers, *descriptors) + 1
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in descriptors]
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
    last = 2
    for number in sorted(number for number in numbers if number > 2):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, max(high) + 1)


def _open_standard(unbuffered: bool) -> None:
    """Makes sys.stdin, stdout and stderr as Python does when it begins."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        raw = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        if unbuffered and number:
            buffer: Any = raw
        else:
            buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream = io.TextIOWrapper(
            buffer, "utf-8", getattr(sys, name).errors, write_through=unbuffered,
            line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        )  # fmt: skip
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork_nursery(base: list[str], ready: Any) -> None:
    """Gives this process, which is to start others, a nursery of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)  # who reads what the launcher prints waits for its end
        if os.getppid() == parent:
            _serve(theirs, base, ready)
        os._exit(0)
    theirs.close()
    nursery = Nursery(ours, ready)

    def end() -> None:
        if os.getpid() == parent:
            nursery.close()
            os.waitpid(pid, 0)

    atexit.register(end)
    install(nursery)


def _run(command: Command, base: list[str]) -> None:
    """Runs a script, a module or code as `python` does; does not return."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [os.path.abspath(entry) for entry in given if entry]
    sys.path[:] = dict.fromkeys([*path, *base])
    sys.path_importer_cache.clear()
    sys.orig_argv[:] = command.arguments
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        import sitecustomize  # noqa: F401
    first = {"script": os.path.dirname(os.path.realpath(command.what)), "module": os.getcwd()}
    if not command.safe_path:
        sys.path.insert(0, first.get(command.kind, ""))
    sys.argv[:] = [command.what, *command.argv]
    try:
        if command.kind == "module":
            import runpy

            sys.argv[0] = "-m"
            runpy._run_module_as_main(command.what)  # type: ignore[attr-defined]
        elif command.kind == "code":
            sys.argv[0] = "-c"
            exec(compile(command.what, "<string>", "exec"), main.__dict__)
        else:
            _run_script(os.path.abspath(command.what), main)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    sys.exit(0)


def _run_script(path: str, main: ModuleType) -> None:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.exit(_complain(f"{sys.executable}: can't open file {path!r}: {error}") + 1)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec"), main.__dict__)
