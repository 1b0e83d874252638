"""A small language for machines: state the facts, get the kernel's files.

Samples and tests are written in it. A fact file is TOML:

    title = "Two packages, four nodes, two cards"
    threads = 2                 # CPU c's siblings are c + sibling_stride, c + 2 * sibling_stride, ...
    sibling_stride = 16         # 1: siblings have neighbouring ids
    cores_per_llc = 4           # cores that share a last-level cache; left out: the whole package
    packages = [
      { id = 0, cpus = "0-7,16-23" },
      { id = 1, cpus = "8-15,24-31" },
    ]
    nodes = [
      { id = 0, cpus = "0-3,16-19", memory = "64 GiB" },
      { id = 1, cpus = "4-7,20-23", memory = "64 GiB" },
      { id = 2, cpus = "8-15,24-31", memory = "128 GiB" },
      { ids = "3-9", memory = "0" },     # no CPUs and no memory
    ]
    distances = [               # both ways; 20 where none is given, and a later one wins
      { from = "0-1", to = "0-1", value = 12 },
      { from = "0-1", to = "2", value = 32 },
    ]
    cards = [                   # 'path': the bridges from the host bridge down, then the card
      { path = "0000:16:01.0/17:00.0/18:00.0/19:00.0", node = 0 },
      { path = "0000:96:01.0/97:00.0" },                # numa_node is -1
    ]
    bridges = [{ address = "0000:96:01.0", node = 2 }]    # else the node of all that is below it
    nics = [{ path = "0000:16:01.0/17:00.0/18:01.0/1a:00.0", node = 0, rdma = ["mlx5_0"] }]

    [card]                      # what every card has that does not say otherwise; also [nic], [function]
    vendor = 0x10de
    device = 0x2330
    class = 0x030200
    model = "NVIDIA H100 80GB HBM3"

Further keys of the machine: `description`, `arch`, `cores` (the CPUs of each core that does not
follow the rule, as on hybrid processors), `llcs`, `offline`, `isolated`, `possible_cpus`,
`possible_nodes`, `kernel_max`, `memory` (without nodes), `numa_balancing`, `functions` (other PCI
functions), `cgroups` (`path`, `cpus`, `nodes`), `own_cgroup`, and `absent`: patterns of files that
this machine lacks, such as "*/topology/core_cpus_list" for an old kernel. Of a package: `dies`. Of a
node: `read_bandwidth`. Of a function: `local_cpus`, `physfn`. Of a card: `memory_node`, `minor`,
`module` (Gaudi), `partitions` (AMD), `has_driver`. Of a NIC: `rdma`, `net`, `ports`. Devices of the
unified bus are `ub_devices` (`name`, `numa`, `entities`).
"""

from __future__ import annotations

from provisioner.facts.check import FactsError, check_facts
from provisioner.facts.toml_form import read_facts
from provisioner.facts.tree import build_tree
from provisioner.facts.values import (
    BridgeFacts,
    CardFacts,
    CgroupFacts,
    DistanceFacts,
    HostFacts,
    NicFacts,
    NodeFacts,
    PackageFacts,
    PciFacts,
    UbFacts,
)

__all__ = [
    "BridgeFacts",
    "CardFacts",
    "CgroupFacts",
    "DistanceFacts",
    "FactsError",
    "HostFacts",
    "NicFacts",
    "NodeFacts",
    "PackageFacts",
    "PciFacts",
    "UbFacts",
    "build_tree",
    "check_facts",
    "read_facts",
]
