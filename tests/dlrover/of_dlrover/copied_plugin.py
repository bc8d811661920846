"""Copied beside DLRover's tests: writes down how each of them ended, for the test that runs them."""

import json
import os

_outcomes = {}


def pytest_runtest_logreport(report):
    name = report.nodeid.rpartition("::")[2]
    if report.when == "call" or report.outcome != "passed":
        _outcomes[name] = report.outcome


def pytest_sessionfinish():
    with open(os.environ["OUTCOMES"], "w") as file:
        json.dump(_outcomes, file)
