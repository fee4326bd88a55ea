"""Open MPI's mpirun, and MPICH's, whose processes are told less."""

import shutil

import pytest
from conftest import PYTHON, Run, check_done

INIT = "train(tw.init())"


def program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed: make test-engines, as root")
    return found


def test_open_mpi(run: Run) -> None:
    command = [program("mpirun.openmpi"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    check_done(run([*command, PYTHON], INIT))


def test_mpich(run: Run) -> None:
    command = [program("mpiexec.mpich"), "-genv", "MASTER_PORT", "29872", "-n", "2"]
    check_done(run([*command, PYTHON], INIT))


def test_mpich_without_a_port_is_refused(run: Run) -> None:
    """No variable tells two starts on one host apart."""
    text = f"""
    try:
        {INIT}
    except ValueError as error:
        print(error)
    """
    told = run([program("mpiexec.mpich"), "-n", "2", PYTHON], text)
    assert told.count("MASTER_PORT is not set: start with mpiexec -genv MASTER_ADDR") == 2
