"""The rules of the house that a tool can check: CONTRIBUTING.md states them for people."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "provisioner"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Who reads a machine's files, and who makes a tree of them from facts.
# `facts/tree.py` and `hwloc.py` make a tree instead of reading one, `scrub.py` knows what each file of
# one may say, and `root.py` asks its own /proc where an open file really lies. `procfs.py` is the reader
# of the worker half, which may import no other.
KNOW_KERNEL_PATHS = {
    *("cardfs.py", "cgroup.py", "hostfs.py", "hwloc.py", "processes.py", "procfs.py", "root.py"),
    *("scrub.py", "sysfs.py", "tree.py"),
}
# What an engine's worker needs inside a container that holds nothing but Python.
STANDARD_LIBRARY_ONLY = (
    "archive",
    "cardfs",
    "cgroup",
    "discovery",
    "errors",
    "facts",
    "hwloc",
    "idset",
    "locality",
    "npu_smi",
    "pci",
    "plan",
    "planner",
    "record",
    "request",
    "root",
    "samples",
    "scrub",
    "snapshot",
    "sysfs",
    "topology",
    "worker",
    "worker.affinity",
    "worker.binding",
    "worker.child",
    "worker.dropin",
    "worker.machine",
    "worker.mempolicy",
    "worker.npusmi",
    "worker.nvml",
    "worker.pages",
    "worker.planned",
    "worker.platform",
    "worker.pool",
    "worker.procfs",
    "worker.report",
    "worker.share",
    "worker.target",
    "worker.unit",
    "worker.visible",
    "worker.visible_rules",
)
# Loading one of these takes longer than most commands run.
HEAVY = ("jinja2", "msgspec", "psutil", "pystemd")


def run(*command: str, cwd: Path = ROOT) -> str:
    """The output of a command; fails the test with it if the exit status is not 0."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}", False)
    return done.stdout


def run_python(code: str, *flags: str) -> str:
    """The output of Python code in a process of its own, started outside the source tree."""
    return run(sys.executable, *flags, "-c", code, cwd=Path(sys.prefix))


def find_tool(name: str) -> str:
    """The path of a tool of the environment that runs the tests."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.fail(f"{path} is missing: make test installs it", False)
    return str(path)


def module_name(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_files() -> list[Path]:
    """Every file that is or may be committed; every one of an unpacked release, where git is not."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_ruff_finds_nothing() -> None:
    run(find_tool("ruff"), "check", "--quiet", "--output-format=concise", ".")


def test_ruff_would_format_nothing() -> None:
    run(find_tool("ruff"), "format", "--quiet", "--diff", ".")


def test_mypy_finds_nothing() -> None:
    run(find_tool("mypy"), "--no-error-summary")


def test_imports_keep_their_contracts() -> None:
    run(find_tool("lint-imports"), "--no-logo")


def test_no_file_names_a_path_of_one_machine() -> None:
    # In two parts, since this file is looked at too.
    forbidden = re.compile(r"(?<![\w.])/(?:work|farm)" + r"/|/root/" + r"\.|/home/(?!USER)\w+/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in list_files()
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def find_kernel_paths(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each text in the code, docstrings aside, that is a path below /sys or /proc.

    A sentence that names such a path is none, so a hint may tell a person where to look.
    """
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and re.match(r"/?(sys|proc)/\S*$|/(sys|proc)$", node.value)
        ):
            yield node.lineno, node.value


def test_only_readers_know_kernel_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in MODULES
        if path.name not in KNOW_KERNEL_PATHS
        for line, text in find_kernel_paths(ast.parse(path.read_text()))
    ]
    assert found == []


def test_kernel_paths_are_found_where_they_are() -> None:
    tree = ast.parse((PACKAGE / "sysfs.py").read_text())
    assert "sys/devices/system/cpu" in [text for _, text in find_kernel_paths(tree)]


def test_importing_the_package_does_nothing() -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        before = set(sys.modules)
        import provisioner
        print(sorted(set(sys.modules) - before), sorted(vars(provisioner).keys() - vars(sys).keys()))
    """
    assert run_python(textwrap.dedent(code), "-I", "-S") == (
        "['provisioner'] ['__builtins__', '__cached__', '__file__', '__path__', '__version__']\n"
    )


def test_core_imports_on_the_bare_standard_library() -> None:
    imports = "; ".join(f"import provisioner.{name}" for name in STANDARD_LIBRARY_ONLY)
    # -S: no site-packages, so nothing that was installed can be found.
    run_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {imports}", "-I", "-S")


def test_modules_import_alone_and_silently() -> None:
    """Each module imports with none of its siblings loaded before it, and writes nothing."""
    names = [module_name(path) for path in MODULES if path.name not in {"__main__.py", "bus.py"}]
    code = f"""
        import importlib, sys
        sys.path.insert(0, {str(ROOT)!r})
        for name in {names!r}:
            for loaded in [one for one in sys.modules if one.partition(".")[0] == "provisioner"]:
                del sys.modules[loaded]
            importlib.import_module(name)
    """
    assert run_python(textwrap.dedent(code)) == ""


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import provisioner.cli; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python(code) == "[]\n"


def list_codes(name: str, *modules: str) -> set[str]:
    """The codes of Note or Problem that the modules, or all of them, give as a text."""
    return {
        node.args[0].value
        for path in MODULES
        if not modules or path.stem in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_notes_and_refusals_are_documented() -> None:
    text = (ROOT / "docs/notes.md").read_text("utf-8")
    planning = ("locality", "planner", "preflight", "ranks", "request", "shares")
    codes = list_codes("Note") | list_codes("Problem", *planning)
    documented = set(re.findall(r"`([a-z_0-9]+)`", text))
    assert {code for code in codes - documented if not code.startswith("nvidia_smi_")} == set()
