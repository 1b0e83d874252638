"""Values of every kind on their way through units, environment files and shells."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.errors import InputError
from provisioner.output import write_files
from provisioner.quoting import format_comments, quote_shell, quote_unit
from provisioner.render import rank_environment
from tests.rendering import (
    HOSTILE,
    make_plan,
    make_rank,
    make_service,
    make_worker,
    render_plan,
)
from tests.systemd import load_units, read_command, read_environment, unit_folder, verify_units


def check_arguments(arguments: list[str]) -> None:
    """Fails unless systemd reads the rendered command back to the same arguments."""
    plan = make_plan(make_service(worker=make_worker("/bin/true", *arguments)))
    with unit_folder(render_plan(plan)) as folder:
        unit = load_units(folder, ["provision@0.service"])["provision@0.service"]
    (line,) = unit["Command Line"]
    assert read_command(line) == ["/bin/true", *arguments]


def test_arguments_survive_systemd() -> None:
    """Systemd starts the worker with the arguments of the request, whatever is in them."""
    check_arguments([*HOSTILE, "noncharacter \ufffe\U0001ffff"])


NONCHARACTER = re.compile(
    "[\ufdd0-\ufdef"
    + "".join(f"{chr(p + 0xFFFE)}{chr(p + 0xFFFF)}" for p in range(0, 0x110000, 0x10000))
    + "]"
)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=15, deadline=None)
@given(st.lists(TEXTS, max_size=40))
def test_any_arguments_survive_systemd(arguments: list[str]) -> None:
    """No text that a process can be given is changed on its way through a unit."""
    check_arguments(arguments)


def test_hostile_paths_reach_the_worker() -> None:
    """Program and working directory are the request's, whatever is in their names."""
    script = f"#!{sys.executable}\nimport os, sys\nprint(ascii([os.getcwd(), *sys.argv]))\n"
    names = [name for name in HOSTILE if name and "/" not in name and len(name) < 200]
    with unit_folder({}) as base:
        places = []
        for number, name in enumerate(names):
            place = base.parent / str(number) / name
            place.mkdir(parents=True)
            (place / f"p{name}").write_text(script)
            (place / f"p{name}").chmod(0o755)
            places.append(place)
        plan = make_plan(
            *(
                make_service(
                    make_rank(0, name=f"s{number}"),
                    name=f"s{number}",
                    worker=make_worker(f"{place}/p{name}", "$HOME %i", directory=str(place)),
                )
                for number, (name, place) in enumerate(zip(names, places, strict=True))
            )
        )
        write_files(render_plan(plan), base)
        units = [f"s{number}@0.service" for number in range(len(names))]
        assert verify_units(base, [f"{base}/{unit}" for unit in units]) == ""
        for unit, name, place in zip(load_units(base, units).values(), names, places, strict=True):
            (line,) = unit["Command Line"]
            done = subprocess.run(
                read_command(line),
                cwd=unit["WorkingDirectory"][0] if "WorkingDirectory" in unit else "/",
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout == ascii([str(place), f"{place}/p{name}", "$HOME %i"]) + "\n"


@pytest.mark.parametrize("directory", ["/usr/../tmp", "/tmp/..", "/..", "/tmp/.", "//tmp//"])
def test_directory_that_is_not_normal_reaches_the_worker(directory: str) -> None:
    """Systemd refuses '..' in WorkingDirectory=, so such a one is entered by a shell."""
    worker = make_worker(sys.executable, "-c", "import os; print(os.getcwd())", directory=directory)
    with unit_folder(render_plan(make_plan(make_service(worker=worker)))) as folder:
        assert verify_units(folder, [f"{folder}/provision@0.service"]) == ""
        unit = load_units(folder, ["provision@0.service"])["provision@0.service"]
    done = subprocess.run(
        read_command(unit["Command Line"][0]),
        cwd=unit.get("WorkingDirectory", ["/"])[0],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(Path(directory).resolve())


def sourced(shell: str, path: Path, names: list[str]) -> dict[str, str]:
    """The values that a shell has for variables once it has read a file."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    show = "".join(f'printf "%s\\0" "${name}"; ' for name in names)
    done = subprocess.run(
        [program, "-c", f'set -eu; . "$1"; {show}', shell, str(path)],
        env={},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return dict(zip(names, done.stdout.decode().split("\0"), strict=False))


def check_environment(tmp_path: Path, values: list[str]) -> None:
    """Fails unless systemd and shells read a rank's file to its environment."""
    variables = {f"V{number}": value for number, value in enumerate(values)}
    service = make_service(worker=make_worker(environment=variables))
    plan = make_plan(service)
    path = tmp_path / "rank0.env"
    path.write_bytes(render_plan(plan)["provision/rank0.env"].text.encode())
    expected = rank_environment(plan, service, service.ranks[0])
    assert variables.items() <= expected.items()
    assert read_environment(path) == expected
    for shell in ("dash", "bash"):
        assert sourced(shell, path, list(expected)) == expected


def test_environment_is_the_same_to_systemd_and_to_shells(tmp_path: Path) -> None:
    """A rank's file is read to the same values by systemd's own reader, dash and bash."""
    check_environment(tmp_path, list(HOSTILE))


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS.filter(lambda text: not NONCHARACTER.search(text)), max_size=20))
def test_any_value_is_the_same_to_systemd_and_to_shells(
    tmp_path_factory: pytest.TempPathFactory, values: list[str]
) -> None:
    """No value that systemd takes at all is changed on its way through a rank's file."""
    check_environment(tmp_path_factory.mktemp("env"), values)


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "\ufffe", "\ufdd0", "\U0010ffff"])
def test_values_that_systemd_refuses_are_refused(value: str) -> None:
    """What systemd would drop the whole file for is an error before it is written."""
    with pytest.raises(InputError):
        render_plan(make_plan(make_service(worker=make_worker(environment={"A": value}))))


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\nB", "Ü", "A;id"])
def test_names_that_are_no_variables_are_refused(name: str) -> None:
    """A name can't smuggle a line into a file that root's shell reads."""
    with pytest.raises(InputError):
        render_plan(make_plan(make_service(worker=make_worker(environment={name: "x"}))))


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "\ta", " a", "a ", "a\\", "\ufffe", "a\0"])
def test_unit_value_that_can_not_be_said_is_refused(value: str) -> None:
    """A setting without quotes takes one line that begins and ends with neither space nor backslash."""
    with pytest.raises(InputError):
        quote_unit(value)


def test_comments_stay_comments() -> None:
    """A comment is printable lines that begin with # and do not end with a backslash."""
    assert format_comments(["a\nExecStart=x", "b\\", "c\x1b"]) == (
        "# a\\nExecStart=x\n# b\\ \n# c\\x1b"
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_shell_word_is_one_word(text: str) -> None:
    """A quoted word is one argument to a shell, whatever is in it."""
    command = f"printf '%s|' {quote_shell(text)}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=True)
    assert done.stdout == f"{text}|".encode()
