"""From a guest script to tests of pytest: one boot for a script and suite, one test a check."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.vm import cache, image, machine, project
from tests.vm.cpio import File
from tests.vm.image import SUITES, Suite
from tests.vm.machine import Machine, Report


def checks(source: str) -> list[str]:
    """The names of the functions in SOURCE that guest.check marks, in their order.

    Read and not imported: a guest script may import what only the machine has.
    """
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any(map(_is_check, node.decorator_list))
    ]


def _is_check(decorator: ast.expr) -> bool:
    marked = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(marked, ast.Name) and marked.id == "check"


class Machines:
    """The boots of one run of pytest; what a boot left, and what it failed with, is kept."""

    def __init__(self) -> None:
        self._boots: dict[tuple[object, ...], Report | Exception] = {}

    def report(
        self,
        suite: Suite,
        asked: Machine,
        script: Path,
        *,
        files: Mapping[str, File] | None = None,
        seconds: float = 600,
    ) -> Report:
        """The report of SCRIPT on this machine, which is booted the first time it is asked for."""
        key = (suite, asked, script)
        lacks = machine.missing() + ([] if cache.is_cached(suite) else image.missing())
        if lacks:
            pytest.skip(f"no virtual machine without {', '.join(lacks)}")
        if key not in self._boots:
            added = {**project.files(suite), **(files or {})}
            try:
                self._boots[key] = machine.boot(
                    asked, cache.get(suite), script, added, seconds=seconds
                )
            except (machine.MachineError, image.BuildError) as error:
                self._boots[key] = error
        found = self._boots[key]
        if isinstance(found, Exception):
            pytest.fail(str(found), pytrace=False)
        return found


def guest_tests(
    script: Path,
    asked: Machine,
    *,
    suites: Sequence[Suite] = SUITES,
    files: Mapping[str, File] | None = None,
    seconds: float = 600,
) -> Callable[..., None]:
    """A test function with one test for each suite and check of SCRIPT.

    Assign it to a name that begins with test_. FILES are added to the machine by absolute
    path; SECONDS limit the boot with all its checks.
    """
    cases = [
        pytest.param(
            suite,
            name,
            id=f"{suite.name}-{name}",
            # One boot for all of them, so one process: pytest-xdist's --dist=loadgroup.
            marks=pytest.mark.xdist_group(f"{script.stem}-{suite.name}"),
        )
        for suite in suites
        for name in checks(script.read_text())
    ]

    @pytest.mark.vm
    @pytest.mark.parametrize("suite, name", cases)
    def test(machines: Machines, suite: Suite, name: str) -> None:
        report = machines.report(suite, asked, script, files=files, seconds=seconds)
        result = report.results.get(name)
        if result is None:
            pytest.fail(f"the machine did not report {name}\n{report.after}", pytrace=False)
        if result.output:
            print(result.output)
        if result.outcome == "skip":
            pytest.skip(result.detail)
        if result.outcome != "ok":
            print(report.after)
            pytest.fail(result.detail, pytrace=False)

    return test
