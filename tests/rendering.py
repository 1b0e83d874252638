"""Plans made by hand, to render: two ranks of one card unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from provisioner.idset import CpuSet, NodeSet
from provisioner.plan import Alignment, Plan, Rank, Service
from provisioner.planfile import format_plan
from provisioner.render import RenderedFile, render
from provisioner.request import MemoryMode, Visible, WorkerRequest

FINGERPRINT = "sha256:" + "0123456789abcdef" * 4

# What could end a value early, add a line, or mean something to systemd, to a shell or to jinja.
HOSTILE = (
    *("100%", "%i", "%%", "$HOME", "${HOME}", "$$", "a$", "`id`", "$(id)", "\\$HOME"),
    *('say "hi"', '"', "it's", "'", "back\\slash", "\\", "end\\", "\\n", "\\x41", '\\"'),
    *("two\nlines", "\nExecStart=/bin/false", "x\n[Install]\n", "end\n", "\n", "\\\n"),
    *("tab\there", "\t", "cr\r", "\r\n", "\x01\x1b[31m\x7f", "\x0b\x0c\x1c", "\x85\u2028"),
    *("ünï", "日本", "\U0001f600", "-lead", "--", "-", ";", "a;b", "; x", "&& x", "| x", "> x"),
    *("", " ", " pad ", "#comment", "A=b", "=", "@x", "+x", "!x", ":x", "~", "*", "{{ x }}"),
    *("{% x %}", "{# x #}", "x" * 3000),
)


def make_rank(
    number: int,
    *,
    name: str = "provision",
    cpus: str = "",
    compile_cpus: str = "",
    nodes: str | None = None,
    cpu_nodes: str = "",
    devices: tuple[int, ...] = (),
    vendor: str = "nvidia",
) -> Rank:
    """A rank: CPUs 4n to 4n + 3, memory node n and card n if nothing else is said."""
    indexes = devices or (number,)
    own = CpuSet.parse_list(cpus or f"{4 * number}-{4 * number + 3}")
    compiling = CpuSet.parse_list(compile_cpus)
    return Rank(
        rank=number,
        slice=f"{name}-rank{number}.slice",
        devices=tuple(f"0000:{0x1B + index:02x}:00.0" for index in indexes),
        device_indexes=indexes,
        vendor=vendor,
        cpu_nodes=NodeSet.parse_list(cpu_nodes or str(number)),
        memory_nodes=NodeSet.parse_list(str(number) if nodes is None else nodes),
        cpus=own,
        main_cpus=own - compiling,
        compile_cpus=compiling,
        main_cores=len(own - compiling),
        nics=(f"mlx5_{number}", f"mlx5_{number + 4}"),
        alignment=Alignment(True, True, True, True, 10),
    )


def make_service(
    *ranks: Rank,
    name: str = "provision",
    memory: MemoryMode = "bind",
    visible: Visible = "service",
    worker: WorkerRequest | None = None,
) -> Service:
    """A service of the ranks, or of two."""
    return Service(
        name=name,
        slice=f"{name}.slice",
        ranks=ranks or (make_rank(0, name=name), make_rank(1, name=name)),
        memory=memory,
        visible_devices=visible,
        worker=worker,
    )


def make_worker(
    *command: str,
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
    group: str | None = None,
    directory: str | None = None,
) -> WorkerRequest:
    """A worker: /bin/true if no command is given."""
    return WorkerRequest(command or ("/bin/true",), user, group, directory, environment or {})


def make_plan(*services: Service, reserved: str = "8-9", confine: bool = False) -> Plan:
    """A plan of the services, or of one."""
    return Plan(
        fingerprint=FINGERPRINT,
        within="root",
        services=services or (make_service(),),
        reserved_cpus=CpuSet.parse_list(reserved),
        unassigned_cpus=CpuSet(),
        confine=confine,
        notes=(),
    )


def render_plan(plan: Plan) -> dict[str, RenderedFile]:
    """The files of a plan."""
    return render(plan, format_plan(plan))
