"""The rendered shell wrapper NAME-run, with a systemd-run that only becomes its command."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from provisioner.output import write_files
from provisioner.plan import Service
from provisioner.render import rank_environment
from tests.rendering import HOSTILE, make_plan, make_rank, make_service, make_worker, render_plan

# Notes its options; becomes the command, whose shell is the tested one, on the given CPUs if any.
SYSTEMD_RUN = """\
#!/bin/sh
if [ "$1" = --version ]; then
    echo "systemd $FAKE_VERSION (1.2-3)"
    exit
fi
while [ "$1" != -- ]; do
    echo "$1" >>"$FAKE_LOG"
    shift
done
shift 2
exec $FAKE_PREFIX "$FAKE_SHELL" "$@"
"""
SHOW = f"#!{sys.executable}\nimport os, sys\nprint(ascii((sys.argv[1:], dict(os.environ))))\n"
TOOLS = ("cat", "env", "readlink", "sh", "taskset")


def read_allowed(key: str) -> str:
    """What the kernel allows a process here that asks for all CPUs."""
    code = (
        "import os; os.sched_setaffinity(0, range(8192)); print(open('/proc/self/status').read())"
    )
    status = subprocess.check_output([sys.executable, "-c", code], text=True)
    found = re.search(rf"^{key}:\s*(\S*)$", status, re.MULTILINE)
    assert found
    return found[1]


CPUS = read_allowed("Cpus_allowed_list")
NODES = read_allowed("Mems_allowed_list")


class Wrapper:
    """A written plan, a fake systemd-run, and a way to call the wrapper."""

    def __init__(self, folder: Path, shell: str) -> None:
        program = shutil.which(shell)
        if program is None:
            pytest.skip(f"{shell} is not installed")
        self.shell = program
        self.units = folder / "units"
        self.log = folder / "log"
        self.tools = folder / "tools"
        self.tools.mkdir()
        for tool in TOOLS:
            if path := shutil.which(tool):
                (self.tools / tool).symlink_to(path)
        self.add_tool("systemd-run", SYSTEMD_RUN)
        self.add_tool("show", SHOW)
        self.write(self.make_service())

    def add_tool(self, name: str, text: str) -> None:
        """Puts a program on the wrapper's path."""
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    @staticmethod
    def make_service(cpus: str = CPUS, nodes: str = NODES) -> Service:
        """A service whose rank 0 is where this process may run; rank 1 is elsewhere."""
        return make_service(make_rank(0, cpus=cpus, nodes=nodes), make_rank(1, cpus="8190-8191"))

    def write(self, service: Service) -> None:
        """Renders a service in the place of the one before."""
        self.service = service
        write_files(render_plan(make_plan(service)), self.units)

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs the wrapper by the tested shell."""
        return [self.shell, str(self.units / "provision-run"), *arguments]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The caller's environment."""
        return {
            "PATH": str(self.tools),
            "FAKE_LOG": str(self.log),
            "FAKE_SHELL": self.shell,
            "FAKE_VERSION": "252",
            "FAKE_PREFIX": "",
            **variables,
        }

    def run(
        self, *arguments: str, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """What became of a call."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(variables),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def show(self, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """The arguments and the environment of a command that the wrapper ran."""
        done = self.run(*arguments, **variables)
        assert (done.returncode, done.stderr) == (0, "")
        # The text of a tuple that `show` has just printed.
        arguments_seen, environment = eval(done.stdout)
        return arguments_seen, environment

    def options(self) -> list[str]:
        """What systemd-run was called with, before the command."""
        return self.log.read_text().splitlines()


@pytest.fixture(params=["dash", "bash"])
def wrapper(request: pytest.FixtureRequest, tmp_path: Path) -> Wrapper:
    """A wrapper for each of the two shells that /bin/sh is on most hosts."""
    return Wrapper(tmp_path, request.param)


def test_arguments_are_the_commands_own(wrapper: Wrapper) -> None:
    """Arguments reach the command as they were given, never split and never expanded."""
    arguments = [text for text in HOSTILE if "\0" not in text]
    assert wrapper.show("0", "show", *arguments)[0] == arguments


def test_environment_is_the_ranks_on_top_of_the_callers(wrapper: Wrapper) -> None:
    """The command has the caller's variables and the rank's, of which the rank's win."""
    _, seen = wrapper.show("0", "show", MINE="stays $HOME", OMP_NUM_THREADS="1", PROVISION_RANK="9")
    expected = rank_environment(
        make_plan(wrapper.service), wrapper.service, wrapper.service.ranks[0]
    )
    caller = wrapper.environment({"MINE": "stays $HOME"})
    # What shells set by themselves, for any command.
    for name in ("PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"):
        seen.pop(name, None)
    assert seen == caller | expected
    assert int(expected["OMP_NUM_THREADS"]) == wrapper.service.ranks[0].main_cores


def test_operators_values_reach_the_command(wrapper: Wrapper) -> None:
    """Values of provision.toml are data to the wrapper, whatever is in them."""
    values = {f"V{number}": text for number, text in enumerate(HOSTILE)}
    rank = make_rank(0, cpus=CPUS, nodes=NODES)
    wrapper.write(make_service(rank, worker=make_worker(environment=values)))
    _, seen = wrapper.show("0", "show")
    assert values.items() <= seen.items()


def test_one_process_with_the_commands_status_and_streams(wrapper: Wrapper) -> None:
    """Process id, exit status and standard streams are the command's own."""
    wrapper.add_tool("talk", '#!/bin/sh\necho "$$"\ncat\necho err >&2\nexit 7\n')
    with subprocess.Popen(
        wrapper.command("0", "talk"),
        env=wrapper.environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate("line one\nline two\n")
    assert (out, err) == (f"{process.pid}\nline one\nline two\n", "err\n")
    assert process.returncode == 7


def test_signals_reach_the_command(wrapper: Wrapper) -> None:
    """What ends the wrapper's process ends the command, and shows as it does without a wrapper."""
    done = wrapper.run("0", "sh", "-c", "kill -TERM $$; exit 3")
    assert done.returncode == -signal.SIGTERM


def test_rank_comes_from_local_rank(wrapper: Wrapper) -> None:
    """Without a number in front LOCAL_RANK says the rank, as under torchrun --no-python."""
    arguments, seen = wrapper.show("show", "train.py", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert arguments == ["train.py"]
    assert seen["PROVISION_RANK"] == "0"
    assert "--slice=provision-rank0.slice" in wrapper.options()


def test_command_may_look_like_a_rank(wrapper: Wrapper) -> None:
    """After -- the command begins, even if it is a number or begins with a dash."""
    shutil.copy(wrapper.tools / "show", wrapper.tools / "5")
    assert wrapper.show("0", "--", "5", "--", "-x")[0] == ["--", "-x"]
    assert wrapper.show("--", "5", "x", LOCAL_RANK="0")[0] == ["x"]


def test_scope_is_in_the_ranks_slice(wrapper: Wrapper) -> None:
    """systemd-run is asked for a scope of its own name in the rank's slice, and says nothing."""
    wrapper.show("0", "show")
    *options, unit, description = wrapper.options()
    assert options == ["--scope", "--quiet", "--collect", "--slice=provision-rank0.slice"]
    assert re.fullmatch(r"--unit=provision-rank0-[0-9]+\.scope", unit)
    assert description == "--description=provision rank 0"


@pytest.mark.parametrize(
    "version, expected",
    [("249", False), ("252", False), ("254~rc1", True), ("257.13", True), ("", False)],
)
def test_expansion_is_switched_off_where_it_can_be(
    wrapper: Wrapper, version: str, expected: bool
) -> None:
    """From systemd 254 on --expand-environment=no is given; before, it would be refused."""
    wrapper.show("0", "show", FAKE_VERSION=version)
    assert ("--expand-environment=no" in wrapper.options()) == expected


@pytest.mark.parametrize(
    "arguments, local_rank, message",
    [
        ([], "", "no command"),
        (["0"], "", "no command"),
        (["0", "--"], "", "no command"),
        (["show"], "", "no rank"),
        (["2", "show"], "", "rank '2' is not in the plan: expected 0 to 1"),
        (["00", "show"], "", "rank '00' is not in the plan"),
        (["show"], "2", "rank '2' is not in the plan"),
        (["show"], "x;id", "rank 'x;id' is not in the plan"),
        (["show"], "*", "rank '*' is not in the plan"),
    ],
)
def test_wrong_usage_is_told(
    wrapper: Wrapper, arguments: list[str], local_rank: str, message: str
) -> None:
    """Wrong usage ends with status 2, one line that says what is wrong, and the usage."""
    variables = {"LOCAL_RANK": local_rank} if local_rank else {}
    done = wrapper.run(*arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"provision-run: {message}")
    assert "\nUsage: provision-run [RANK]" in done.stderr
    assert done.stdout == ""


def test_help_is_no_error(wrapper: Wrapper) -> None:
    """--help prints the usage to standard output."""
    done = wrapper.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: provision-run [RANK]")


def test_host_without_systemd_is_told(wrapper: Wrapper) -> None:
    """Where systemd-run is missing the command is not run."""
    (wrapper.tools / "systemd-run").unlink()
    done = wrapper.run("0", "show")
    assert done.returncode == 2
    assert "systemd-run is missing" in done.stderr
    assert done.stdout == ""


def test_missing_environment_is_told(wrapper: Wrapper) -> None:
    """Without the rank's file the command is not run, and the file is named."""
    (wrapper.units / "provision" / "rank0.env").unlink()
    done = wrapper.run("0", "show")
    assert done.returncode == 125
    assert "rank0.env is missing" in done.stderr


def test_environment_is_found_beside_the_real_script(wrapper: Wrapper) -> None:
    """A link to the wrapper, as in a folder of programs, finds the files where the script lies."""
    (wrapper.tools / "provision-run").symlink_to(wrapper.units / "provision-run")
    done = subprocess.run(
        [wrapper.tools / "provision-run", "0", "sh", "-c", "echo $PROVISION_RANK"],
        env=wrapper.environment({}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"


def test_wrong_cpus_are_told(wrapper: Wrapper) -> None:
    """Where the kernel allows other CPUs than the plan's, status 125 and no command."""
    done = wrapper.run("1", "show")
    assert done.returncode == 125
    assert done.stdout == ""
    first, hint = done.stderr.splitlines()
    assert first == (
        f"provision-run: rank 1: runs on CPUs {CPUS} and memory nodes {NODES}: "
        "expected CPUs 8190-8191 and memory nodes 1"
    )
    assert "provision verify" in hint


def test_wrong_memory_nodes_are_told_where_they_are_walled_in(wrapper: Wrapper) -> None:
    """Memory nodes are compared in mode bind, and not in the others, which wall nothing in."""
    rank = make_rank(0, cpus=CPUS, nodes="63")
    wrapper.write(make_service(rank))
    done = wrapper.run("0", "show")
    assert done.returncode == 125
    assert "and memory nodes 63" in done.stderr
    wrapper.write(make_service(rank, memory="prefer"))
    wrapper.show("0", "show")
    wrapper.write(make_service(make_rank(0, cpus="8190", nodes="63"), memory="prefer"))
    done = wrapper.run("0", "show")
    assert done.returncode == 125
    assert "expected CPUs 8190\n" in done.stderr


def test_inherited_affinity_is_reset(wrapper: Wrapper) -> None:
    """A launcher that was pinned to one CPU does not pin the command."""
    if len(os.sched_getaffinity(0)) < 2 or not (wrapper.tools / "taskset").exists():
        pytest.skip("needs two CPUs and taskset")
    first = re.split("[,-]", CPUS)[0]
    status = "while read -r k v; do case $k in Cpus_allowed_list:) echo $v;; esac; done"
    done = wrapper.run(
        "0", "sh", "-c", f"{status} </proc/self/status", FAKE_PREFIX=f"taskset -c {first}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{CPUS}\n", "")


def test_affinity_is_reset_to_all_cpus(wrapper: Wrapper) -> None:
    """All CPUs are asked for, not today's: a slice that is widened later widens the command too."""
    (wrapper.tools / "taskset").unlink(missing_ok=True)
    wrapper.add_tool("taskset", '#!/bin/sh\necho "$1 $2" >>"$FAKE_LOG.taskset"\n')
    if len(os.sched_getaffinity(0)) != len(make_rank(0, cpus=CPUS).cpus):
        pytest.skip("needs a test process that is not pinned")
    wrapper.show("0", "show")
    asked = wrapper.log.with_suffix(".taskset").read_text()
    assert asked == f"-p {'f' * (8192 // 4)}\n"


def test_missing_taskset_matters_only_if_the_mask_is_wrong(wrapper: Wrapper) -> None:
    """Without taskset the command runs where the CPUs are right anyway, and else is refused."""
    taskset = shutil.which("taskset")
    (wrapper.tools / "taskset").unlink(missing_ok=True)
    if len(os.sched_getaffinity(0)) == len(make_rank(0, cpus=CPUS).cpus):
        wrapper.show("0", "show")
    if taskset is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs and taskset")
    first = re.split("[,-]", CPUS)[0]
    done = wrapper.run("0", "show", FAKE_PREFIX=f"{taskset} -c {first}")
    assert done.returncode == 125
    assert f"runs on CPUs {first} " in done.stderr


def test_caller_who_lists_the_cards_numbers_them_too(wrapper: Wrapper) -> None:
    """CUDA_VISIBLE_DEVICES of the caller stays, and with it what says which entry is the rank's."""
    given = {
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "7",
    }
    _, seen = wrapper.show("0", "show", **given)
    assert given.items() <= seen.items()
    _, seen = wrapper.show("0", "show", CUDA_VISIBLE_DEVICES="")
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["LOCAL_RANK"]) == ("", "0")


def test_rank_and_card_agree_where_the_plan_lists_the_cards(wrapper: Wrapper) -> None:
    """LOCAL_RANK left by another launcher does not send a rank to another rank's card."""
    _, seen = wrapper.show("0", "show", LOCAL_RANK="1", LOCAL_WORLD_SIZE="7")
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("0", "0,1")
    assert seen["LOCAL_WORLD_SIZE"] == "7"


def test_rank_that_sees_its_own_card_is_numbered_so(wrapper: Wrapper) -> None:
    """Under torchrun with visible_devices "rank" the number matches the list of one card."""
    ranks = (make_rank(0, cpus="8190", nodes=NODES), make_rank(1, cpus=CPUS, nodes=NODES))
    wrapper.write(make_service(*ranks, visible="rank"))
    _, seen = wrapper.show("show", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert seen["PROVISION_RANK"] == "1"
    assert (seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert seen["CUDA_VISIBLE_DEVICES"] == "1"


def test_nccl_keeps_to_the_slice_unless_the_operator_says_so(wrapper: Wrapper) -> None:
    """NCCL_IGNORE_CPU_AFFINITY of the caller is taken away, that of provision.toml is not."""
    assert (
        "NCCL_IGNORE_CPU_AFFINITY" not in wrapper.show("0", "show", NCCL_IGNORE_CPU_AFFINITY="1")[1]
    )
    worker = make_worker(environment={"NCCL_IGNORE_CPU_AFFINITY": "1"})
    wrapper.write(make_service(make_rank(0, cpus=CPUS, nodes=NODES), worker=worker))
    assert wrapper.show("0", "show")[1]["NCCL_IGNORE_CPU_AFFINITY"] == "1"


def test_missing_command_is_told_as_shells_do(wrapper: Wrapper) -> None:
    """A command that is not there ends with status 127 and its name."""
    done = wrapper.run("0", "no-such-command")
    assert done.returncode == 127
    assert "no-such-command" in done.stderr
    assert done.stderr.startswith("provision-run: rank 0: ")


def test_a_filter_that_counts_anew_is_taken_away(wrapper: Wrapper) -> None:
    """ROCR_VISIBLE_DEVICES of the caller would count HIP's cards anew; HIP's own list is the caller's to set."""
    ranks = (
        make_rank(0, cpus=CPUS, nodes=NODES, vendor="amd"),
        make_rank(1, cpus="8190", vendor="amd"),
    )
    wrapper.write(make_service(*ranks))
    _, seen = wrapper.show("0", "show", ROCR_VISIBLE_DEVICES="4,5", GPU_DEVICE_ORDINAL="4")
    assert seen["HIP_VISIBLE_DEVICES"] == "0,1"
    assert {"ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}.isdisjoint(seen)
    _, seen = wrapper.show("0", "show", HIP_VISIBLE_DEVICES="5,4", LOCAL_RANK="1")
    assert (seen["HIP_VISIBLE_DEVICES"], seen["LOCAL_RANK"]) == ("5,4", "1")


def test_rank_of_a_service_over_two_vendors_is_a_number(wrapper: Wrapper) -> None:
    """LOCAL_RANK is each vendor's own there: without a number nothing is run."""
    ranks = (
        make_rank(0, cpus=CPUS, nodes=NODES, vendor="nvidia"),
        make_rank(1, cpus=CPUS, nodes=NODES, vendor="amd"),
    )
    wrapper.write(make_service(*ranks))
    done = wrapper.run("show", LOCAL_RANK="0")
    assert done.returncode == 2
    assert "LOCAL_RANK counts the ranks of one vendor" in done.stderr
    _, seen = wrapper.show("1", "show")
    assert (seen["LOCAL_RANK"], seen["HIP_VISIBLE_DEVICES"]) == ("0", "1")
    assert "CUDA_VISIBLE_DEVICES" not in seen
