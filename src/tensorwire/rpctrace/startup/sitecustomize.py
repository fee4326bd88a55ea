"""Runs in every Python process under `tensorwire rpc trace`, as Python's own `sitecustomize`.

The command puts this folder in front of PYTHONPATH, which stays so that processes which these start
are traced too. sys.path becomes the user's again, a `sitecustomize` of the user or the system runs
as it would have. Nothing of grpcio is imported: it is changed when the program imports it.
"""

import os
import sys

_FOLDER = "TENSORWIRE_RPC_TRACE"
_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_users() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _trace(folder: str) -> None:
    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    # By its path, under another name: this Python need not have tensorwire.
    room = os.path.dirname(_HERE)
    name = "_tensorwire_rpctrace"
    spec = spec_from_file_location(
        name, os.path.join(room, "__init__.py"), submodule_search_locations=[room]
    )
    assert spec is not None
    sys.modules[name] = module_from_spec(spec)
    recorder = import_module(f"{name}.recorder").Recorder(folder)
    sys.meta_path.insert(0, import_module(f"{name}.patches").Tracer(recorder))
    with open(os.path.join(folder, f"{os.getpid()}.python"), "w"):
        pass  # so that it is known that there was a Python


def _main() -> None:
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    folder = os.environ.get(_FOLDER, "")
    if os.path.isdir(folder):
        try:
            _trace(folder)
        except Exception as error:  # the program runs nevertheless
            sys.stderr.write(f"tensorwire rpc trace: this process is not traced: {error!r}\n")
    _run_the_users()


_main()
