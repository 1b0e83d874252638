"""Which rank a process is, by its cgroup's path."""

from __future__ import annotations

import pytest

from provisioner.worker.unit import Unit, find_unit


@pytest.mark.parametrize(
    "paths, expected",
    [
        ([], None),
        (["/"], None),
        (["/system.slice/sshd.service"], None),
        (["/provision.slice/provision-rank3.slice"], Unit("provision-rank3.slice", "provision", 3, True)),
        (
            ["/a.slice/a-rank12.slice/a@12.service"],
            Unit("a-rank12.slice", "a", 12, True),
        ),
        (["/a.slice/a-rank1.slice/run-r5.scope"], Unit("a-rank1.slice", "a", 1, True)),
        (["/system.slice/system-engine.slice/engine@7.service"], Unit("engine@7.service", "engine", 7, False)),
        (["/user.slice/user-1000.slice/user@1000.service/app.slice/x.service"], None),
        (["/user.slice/user-0.slice/user@0.service"], None),
        (["/a.slice/a-rank.slice"], None),
        (["/-rank1.slice"], None),
        (["/x@one.service"], None),
        (["/", "/a.slice/a-rank2.slice"], Unit("a-rank2.slice", "a", 2, True)),
    ],
)  # fmt: skip
def test_unit_says_the_rank(paths: list[str], expected: Unit | None) -> None:
    """A rank's slice says the rank, else the innermost service's instance; a user's number is no rank."""
    assert find_unit(paths) == expected
