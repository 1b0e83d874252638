"""Where a process's pages lie, against where the plan wants them.

The kernel walks every page table to write numa_maps, which takes a moment in a process of many gigabytes.
"""

from __future__ import annotations

import os

from provisioner.errors import ParseError
from provisioner.idset import NodeSet
from provisioner.numa_maps import PagePlacement, parse_numa_maps
from provisioner.worker.procfs import describe_numa_maps, read_environment, read_numa_maps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from provisioner.root import Root


def page_placement(
    pid: int | None = None, root: Root | None = None, nodes: NodeSet | None = None
) -> PagePlacement:
    """Where the pages of a process lie, and where the plan wants them. Unit: bytes.

    Args:
        pid: the process; None is this one (in a recording, the one that recorded).
        root: a recorded machine; None is the running one, whose file is read line by line.
        nodes: where the pages should lie; None is what the process was bound to, by this process's
            own `bind_local_rank` or by the environment that the process was started with.

    Raises:
        ReadError: the file is not there or may not be read.
        ParseError: it is not of its form.
    """
    try:
        found = parse_numa_maps(read_numa_maps(pid, root))
    except ParseError as error:
        raise error.at(describe_numa_maps(pid, root)) from error
    planned = nodes if nodes is not None or root is not None else _find_planned_nodes(pid)
    return PagePlacement(found.anonymous, found.file, found.mixed, planned)


def _find_planned_nodes(pid: int | None) -> NodeSet | None:
    if pid is None or pid == os.getpid():
        from provisioner.worker.binding import last_result

        bound = last_result()
        if bound is not None and bound.target.memory_nodes:
            return bound.target.memory_nodes
    environ = os.environ if pid is None else read_environment(pid) or {}
    try:
        return NodeSet.parse_list(environ.get("PROVISION_MEMORY_NODES", "")) or None
    except ParseError:
        return None
