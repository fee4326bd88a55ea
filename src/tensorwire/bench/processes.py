"""Starts two processes for one system: a driver that is measured, and its target.

Every system, tensorwire included, runs in a pair of its own, spawned (never forked), so that no
library disturbs another one and CPU time can be told apart. The bench's own process only sends
commands and draws. A pair that dies or stops answering becomes an error with a reason, never a
hang.

A module that runs in a pair has

    class Driver:                      # in the driver process; its methods are called by name
        def __init__(self, link: Connection, options: dict[str, Any]) -> None
    def serve(link: Connection, options: dict[str, Any]) -> None      # in the target, until "stop"

`link` joins the two; `options` is what the bench passed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.machine import pin_process

_ANSWER_S = 120.0
_PR_SET_PDEATHSIG = 1


class PairError(Exception):
    """A pair could not do what it was asked; the message is the reason for a row's note."""


class ProcessPair:
    """The driver and the target process of one system.

    Calls block and are for one thread. `close` always ends both processes and may be called twice.

    Args:
        module: of both, see above.
        options: for both.
        polls: a thread of it looks for work without ever sleeping. So both processes stand still
            (SIGSTOP) from one call to the next, and leave the cores to the other systems.

    Attributes:
        closed: the pair has ended, by close or because it failed.

    Raises:
        PairError: the two did not come up.
    """

    def __init__(self, module: str, options: dict[str, Any], *, polls: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._module = module
        self._control, driver_control = context.Pipe()
        driver_link, target_link = context.Pipe()
        self._target = context.Process(
            target=_run_target, args=(module, target_link, options, polls), daemon=True
        )
        self._driver = context.Process(
            target=_run_driver,
            args=(module, driver_control, driver_link, options, polls),
            daemon=True,
        )
        self.closed = False
        self._polls = polls
        if polls:  # else nobody could end them where this is interrupted
            atexit.register(self._go_on)
        try:
            self._target.start()
            target_link.close()
            self._driver.start()
            driver_link.close()
            driver_control.close()
            self._answer("start", _ANSWER_S)
            self._stand_still()
        except BaseException:
            self.close()
            raise

    @property
    def target_pid(self) -> int:
        """The process number of the target."""
        assert self._target.pid is not None
        return self._target.pid

    def call(self, method: str, *args: Any, timeout_s: float = _ANSWER_S) -> Any:
        """Calls a method of the Driver in its process and returns the result.

        Raises:
            PairError: the method raised, a process died, or no answer came in time. After the last
                two the pair is closed.
        """
        if self.closed:
            raise PairError(f"{self._module}: its processes have ended")
        self._go_on()
        try:
            self._control.send((method, args))
        except OSError as error:
            self.close()
            raise PairError(f"{self._module}: the driver process has ended ({error})") from error
        try:
            return self._answer(method, timeout_s)
        finally:
            self._stand_still()

    def _stand_still(self) -> None:
        """Stops both processes, if they would poll."""
        if self._polls and not self.closed:
            self._signal(signal.SIGSTOP)

    def _go_on(self) -> None:
        """Lets both processes go on, if they stand still."""
        if self._polls:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in (self._driver, self._target):
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def _answer(self, method: str, timeout_s: float) -> Any:
        try:
            if not self._control.poll(timeout_s):
                self.close()
                raise PairError(f"no answer to '{method}' within {timeout_s:g} s")
            good, result = self._control.recv()
        except (EOFError, OSError) as error:
            self._driver.join(1)
            code = self._driver.exitcode
            self.close()
            raise PairError(f"the driver process ended in '{method}', exit code {code}") from error
        if not good:
            raise PairError(str(result))
        return result

    def close(self) -> None:
        """Ends both processes: asks first, then kills. Always succeeds."""
        if self.closed:
            return
        self.closed = True
        self._go_on()
        atexit.unregister(self._go_on)
        with contextlib.suppress(OSError):
            self._control.send(("stop", ()))
        for process in (self._driver, self._target):
            if process.pid is None:
                continue
            process.join(3)
            for end in (process.terminate, process.kill):
                if process.exitcode is None:
                    end()
                    process.join(2)
        self._control.close()

    def __enter__(self) -> ProcessPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_messages(link: Connection, handlers: dict[str, Callable[..., object]]) -> None:
    """Runs the target's loop: sends its process number, then acts on (name, argument, …).

    A handler's result is sent back unless it is None. "pin" is known to every target.
    """

    def pin(cores: list[int]) -> bool:
        pin_process(cores)
        return True

    handlers = {"pin": pin, **handlers}
    link.send(os.getpid())
    while True:
        name, *arguments = link.recv()
        if name == "stop":
            return
        result = handlers[name](*arguments)
        if result is not None:
            link.send(result)


def _quiet_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the bench ends its pairs in order


def _end_with_bench() -> None:
    """Makes the kernel kill this process when the bench ends; a stopped one sees no closed pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    if os.environ.get("TENSORWIRE_BENCH_DEBUG"):
        traceback.print_exception(error, file=sys.stderr)
    return reason[:300]


def _run_target(module: str, link: Connection, options: dict[str, Any], polls: bool) -> None:
    _quiet_interrupts()
    if polls:
        _end_with_bench()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        importlib.import_module(module).serve(link, options)


def _run_driver(
    module: str, control: Connection, link: Connection, options: dict[str, Any], polls: bool
) -> None:
    _quiet_interrupts()
    if polls:
        _end_with_bench()
    try:
        driver = importlib.import_module(module).Driver(link, options)
    except BaseException as error:
        with contextlib.suppress(OSError):
            control.send((False, _reason(error)))
        return
    control.send((True, None))
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args = control.recv()
            if method == "stop":
                break
            try:
                control.send((True, getattr(driver, method)(*args)))
            except Exception as error:
                control.send((False, _reason(error)))
    with contextlib.suppress(Exception):
        driver.close()
    with contextlib.suppress(OSError):
        link.send(("stop", ()))
