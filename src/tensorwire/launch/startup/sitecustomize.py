"""Runs in every worker of `tensorwire run` before its script, as Python's own `sitecustomize`.

The launcher puts this folder in front of PYTHONPATH. This module gives PYTHONPATH and sys.path back
to the user, runs a `sitecustomize` of the user or the system as it would have run, and sends an
exception that ends the worker to the launcher, which shows the exceptions of all workers together.
Nothing else of the worker differs from `python SCRIPT`, and nothing of tensorwire is imported.
"""

import os
import sys
from types import TracebackType

_FD = "TENSORWIRE_REPORT_FD"
_HERE = os.path.dirname(os.path.abspath(__file__))


def _give_back() -> None:
    """Restores the path without this folder, for this process and its children."""
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    rest = os.environ.get("PYTHONPATH", "").removeprefix(_HERE).removeprefix(os.pathsep)
    if rest:
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_the_users() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch(descriptor: int) -> None:
    pid, original = os.getpid(), os.fstat(2) if _is_open(2) else None
    os.set_inheritable(descriptor, False)

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != pid:  # a forked child: the launcher knows nothing of it
            sys.__excepthook__(kind, error, trace)
            return
        try:
            _send(descriptor, error, trace)
        except BaseException as why:
            sys.__excepthook__(kind, error, trace)  # better whole than lost
            if not isinstance(why, OSError):
                sys.stderr.write(f"the launcher could not be told of this: {why!r}\n")
            return
        now = os.fstat(2) if _is_open(2) else None
        moved = (now is None) != (original is None) or (
            now is not None and original is not None and not os.path.samestat(now, original)
        )
        if moved or _stderr() is not sys.__stderr__:
            sys.__excepthook__(kind, error, trace)  # the script keeps its errors elsewhere, too

    sys.excepthook = report


def _stderr() -> object:
    """Returns the script's stderr, not the buffer that torch.distributed's hook installs."""
    caller = sys._getframe(1).f_back  # of the hook above; Python itself is no frame
    if caller is None or caller.f_code.co_name != "_distributed_excepthook":
        return sys.stderr
    return caller.f_locals.get("old_stderr")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _send(descriptor: int, error: BaseException, trace: TracebackType | None) -> None:
    import dataclasses
    import json
    from importlib.util import module_from_spec, spec_from_file_location

    # By its path: the worker need not have imported tensorwire, which takes its time.
    path = os.path.join(_HERE, "..", "..", "tracebacks.py")
    spec = spec_from_file_location("_tensorwire_tracebacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    if sys.stdout is not None:
        sys.stdout.flush()  # what was printed before comes before
    data = json.dumps(dataclasses.asdict(module.failure_of(error, trace))).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _main() -> None:
    _give_back()
    # Last, so that a hook of the user's sitecustomize stays: then Python prints as that one wants.
    descriptor = os.environ.pop(_FD, "")
    _run_the_users()
    if descriptor and sys.excepthook is sys.__excepthook__:
        _watch(int(descriptor))


_main()
