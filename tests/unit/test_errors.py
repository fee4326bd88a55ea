"""The error vocabulary: what can be caught as what, and that no code gets lost."""

import builtins
import ctypes
import operator
import pickle
import re
from functools import partial
from pathlib import Path

import pytest

import tensorwire
from tensorwire import errors

OWN = [
    errors.BusyError,
    errors.ClosedError,
    errors.PeerLostError,
    errors.StaleHandleError,
    errors.TimeoutError,
    errors.UnavailableError,
]
CODES = {
    1: errors.ClosedError,
    2: errors.PeerLostError,
    3: errors.StaleHandleError,
    4: errors.BusyError,
    5: errors.TimeoutError,
    6: errors.UnavailableError,
    7: ValueError,
    8: PermissionError,
    9: LookupError,
    10: MemoryError,
    11: TypeError,
}


@pytest.mark.parametrize("kind", OWN)
def test_own_errors_share_a_base(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.TensorwireError)
    assert getattr(tensorwire, kind.__name__) is kind
    assert kind.__doc__


def test_builtin_habits_work() -> None:
    assert issubclass(errors.TimeoutError, builtins.TimeoutError)
    assert issubclass(errors.PeerLostError, ConnectionError)


@pytest.mark.parametrize(("code", "kind"), CODES.items())
def test_from_code(code: int, kind: type[Exception]) -> None:
    error = errors.from_code(code, "peer 'a' said no")
    assert type(error) is kind
    assert str(error) == "peer 'a' said no"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_an_unknown_code_is_not_lost() -> None:
    error = errors.from_code(77, "something new")
    assert type(error) is errors.TensorwireError
    assert "something new" in str(error)
    assert "77" in str(error)


def test_codes_are_those_of_the_core(repository: Path) -> None:
    header = (repository / "cpp/base/error.h").read_text()
    numbers = {int(number) for number in re.findall(r"^\s*k\w+ = (\d+),", header, re.MULTILINE)}
    assert numbers == {0, *CODES}


def test_a_signal_while_an_error_is_made() -> None:
    """Making one of our errors runs Python code, and there a handler may raise: that counts."""
    with tensorwire.Node() as node:
        # Without a step of the interpreter between the two, which would run the handler before.
        calls = (ctypes.pythonapi.PyErr_SetInterrupt, partial(node._core.region, "missing"))
        with pytest.raises(KeyboardInterrupt):
            list(map(operator.call, calls))
        with pytest.raises(LookupError):
            node.region("missing")
