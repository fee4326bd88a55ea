"""Makes torch begin and end in half of its time, in the processes that tests start.

tests/conftest.py puts this folder into PYTHONPATH; tests marked `whole_torch` run without it.

With the first optimizer torch imports its compiler, only to tell it what not to trace: 1.5 of the 3
seconds of CPU that a small worker takes. Here the compiler is told once something else has imported
it; before, there is nobody to tell. And the garbage collector leaves alone the objects of torch's
modules, which it would look through several times when a process begins and when it ends. Modules
that torch imports for its compiler and for tensors without memory, a quarter of the rest, are
imported when somebody asks for something in them.

Each Python process of the tests imports this file, so at first it imports next to nothing itself.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from types import ModuleType

TYPE_CHECKING = False  # as `typing` has it, which takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from typing import Any

_COMPILER = "torch._dynamo"
_LATE = ("torch._meta_registrations", "torch.export")


class _Finder:
    """Finds modules where they are, and has some of them changed when they have been run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (change := _CHANGES.get(name)) is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            import functools

            # Of this loader alone: everything else of it is asked for by torch and by inspect.
            spec.loader.exec_module = functools.partial(change, spec.loader)
        return spec


def _run(loader: Loader, module: ModuleType) -> None:
    type(loader).exec_module(loader, module)


def _without_collector(loader: Loader, module: ModuleType) -> None:
    import gc

    gc.disable()
    try:
        _run(loader, module)
    finally:
        gc.enable()
    gc.freeze()
    if hasattr(module._C, "_set_generator_metaclass"):  # what is late would have done it
        from torch._opaque_base import OpaqueBaseMeta

        module._C._set_generator_metaclass(OpaqueBaseMeta)


class _Late(ModuleType):
    """A module that is run when something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what asks looks at all modules
            raise AttributeError(name)
        self._load()
        return getattr(self, name)

    def _load(self) -> None:
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__dict__.pop("_run")()


def _late(loader: Loader, module: ModuleType) -> None:
    import functools

    module.__dict__["_run"] = functools.partial(_run, loader, module)
    module.__class__ = _Late


def _behind_the_late(loader: Loader, module: ModuleType) -> None:
    """Imports the late modules, in torch's order, before the compiler, which needs them."""
    for name in _LATE:
        if type(late := sys.modules.get(name)) is _Late:
            late._load()
    _run(loader, module)


def _sources_without_modules(loader: Loader, module: ModuleType) -> None:
    """Finds the source of an operator without torch's search through the files of all modules."""
    _run(loader, module)

    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    module.get_source = get_source  # type: ignore[attr-defined]


def _disables_late(loader: Loader, module: ModuleType) -> None:
    import functools

    _run(loader, module)
    original = module._disable_dynamo

    def _disable_dynamo(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(_disable_dynamo, recursive=recursive)
        return _if_compiler(function, original(function, recursive), function)

    module._disable_dynamo = _disable_dynamo


def _steps_without_compiler(loader: Loader, module: ModuleType) -> None:
    _run(loader, module)
    original = module._use_grad_for_differentiable

    def _use_grad_for_differentiable(function: Callable[..., Any]) -> Any:
        def step(*arguments: Any, **options: Any) -> Any:
            with module.torch.set_grad_enabled(arguments[0].defaults["differentiable"]):
                return function(*arguments, **options)

        return _if_compiler(function, original(function), step)

    module._use_grad_for_differentiable = _use_grad_for_differentiable


def _if_compiler(
    function: Callable[..., Any], whole: Callable[..., Any], lean: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns torch's function where its compiler is there, and else one without it."""
    import functools

    def either(*arguments: Any, **options: Any) -> Any:
        return (whole if _COMPILER in sys.modules else lean)(*arguments, **options)

    return functools.update_wrapper(either, function)


_CHANGES: dict[str, Callable[[Loader, ModuleType], None]] = {
    "torch": _without_collector,
    "torch._compile": _disables_late,
    "torch._library.utils": _sources_without_modules,
    _COMPILER: _behind_the_late,
    **dict.fromkeys(_LATE, _late),
    "torch.optim.optimizer": _steps_without_compiler,
}

sys.meta_path.insert(0, _Finder())
