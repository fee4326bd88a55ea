"""A pytest plugin that writes each begin and end of a test at once, so that a crash loses none."""

import os
import sys

import pytest
import sitecustomize


def _write(word: str, test: str, more: str = "") -> None:
    with open(os.environ["TENSORWIRE_GRPCIO_OUTCOMES"], "a", encoding="utf-8") as file:
        print(word, test, more, sep="\t", file=file)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write("uncollected", report.nodeid, _reason(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    if sitecustomize.given and "grpc" in sys.modules and not sitecustomize.REPLACED:
        pytest.exit("the factories of grpcio were not replaced", 3)
    sitecustomize.USED.clear()
    _write("begun", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write("failed", report.nodeid, _reason(report))
    elif report.skipped:
        _write("skipped", report.nodeid, _reason(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write("ended", nodeid, " ".join(word for word, count in sitecustomize.USED.items() if count))


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    return " ".join((report.longreprtext.strip().splitlines() or ["?"])[-1].split())[:300]
