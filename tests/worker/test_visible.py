"""ENGINE.md, "From rank to physical card": each row, with the old formula's answer where it was wrong."""

from __future__ import annotations

import pytest

from provisioner.errors import InputError
from provisioner.pci import PciAddress
from provisioner.topology import Accelerator
from provisioner.worker.visible import (
    RankError,
    UnknownDeviceError,
    assign_visible_devices,
    card_of_rank,
    physical_device_id,
    resolve_visible,
    set_visible_devices,
    visible_device_ids,
)

# The first two begin alike.
UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-89320000-1111-2222-3333-444444444444",
    "GPU-1b5c1f47-0000-1111-2222-333333333333",
    "GPU-c0ffee00-0000-1111-2222-333333333333",
    "GPU-5a5a5a5a-0000-1111-2222-333333333333",
    "GPU-6b6b6b6b-0000-1111-2222-333333333333",
    "GPU-7c7c7c7c-0000-1111-2222-333333333333",
    "GPU-9d9d9d9d-0000-1111-2222-333333333333",
)


def make_card(
    index: int, vendor: str = "nvidia", uuid: str | None = None, model: str | None = "NVIDIA H100"
) -> Accelerator:
    """A card; its bus number is 0x10 more than its number."""
    address = PciAddress(0, 0x10 + index, 0, 0)
    return Accelerator(vendor, index, address, "driver", model=model, uuid=uuid)


CARDS = tuple(make_card(index, uuid=uuid) for index, uuid in enumerate(UUIDS))
NPUS = tuple(make_card(index, "ascend", model=None) for index in range(8))
AMDS = tuple(
    make_card(index, "amd", f"GPU-{0xA0A0 + index // 2:04x}{index:012x}", "MI300X")
    for index in range(8)
)


def find_no_parent(_uuid: str) -> None:
    """Stands for a machine without NVML."""


def cards_of(value: str | None, kind: str = "nvidia", **others: str) -> list[int | None]:
    """The numbers of the cards by rank, the vendor's own variable having the value; None is not known."""
    cards = {"nvidia": CARDS, "ascend": NPUS, "amd": AMDS}[kind]
    names = {
        "nvidia": "CUDA_VISIBLE_DEVICES",
        "ascend": "ASCEND_RT_VISIBLE_DEVICES",
        "amd": "HIP_VISIBLE_DEVICES",
    }
    environ = dict(others) if value is None else {names[kind]: value, **others}
    shown = resolve_visible(cards, environ, kind, find_no_parent)
    return [None if one.card is None else one.card.index for one in shown.devices]


def old_visible_device_ids(value: str | None) -> list[str]:
    """visible_device_ids() of deep_cluster, as ENGINE.md describes it."""
    if value is None:
        return [str(index) for index in range(8)]
    return [] if value in ("", "-1") else value.split(",")


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("-1", []),
        ("4,5", [4, 5]),
        ("5,4", [5, 4]),
        (" 4 , 5", [4, 5]),
        ("+3", [3]),
        (UUIDS[2], [2]),
        (UUIDS[2].upper(), [2]),
        (f"{UUIDS[7]},{UUIDS[0]}", [7, 0]),
        ("GPU-1b", [2]),
        (f"3,{UUIDS[2]}", [3, 2]),
        (f"MIG-{UUIDS[5]}/1/0", [5]),
        (f"MIG-{UUIDS[5]}/1/0,MIG-{UUIDS[5]}/2/0", [5, 5]),
        ("6:0,6:1", [6, 6]),
    ],
)
def test_visible_device_ids(value: str | None, expected: list[int]) -> None:
    """visible_device_ids(): unset shows all, empty and -1 none, and every form of a name its card."""
    assert cards_of(value) == expected
    if value is not None and expected:
        environ = {"CUDA_VISIBLE_DEVICES": value}
        assert list(visible_device_ids(environ, cards=CARDS)) == value.split(",")


@pytest.mark.parametrize(
    "value, expected, why",
    [
        ("0,2,-1,1", [0, 2], "'-1' ends the list"),
        ("0,8,1", [0], "'8' is out of range: there are 8 devices, numbered from 0"),
        ("1,1", [], "'1' is a repeated device, for which nothing at all is shown"),
        (f"2,{UUIDS[2]}", [], "is a repeated device"),
        (f"0,{UUIDS[3]}x", [0], "is no device: no card's UUID begins so"),
        ("GPU-8932,3", [], "'GPU-8932' is ambiguous: the UUIDs of cards 0, 1 begin so"),
        ("1,,2", [1], "'' is no device"),
        ("0,two,3", [0], "'two' is no device"),
        ("7,00000000000008", [7], "out of range"),
        ("7,99999999999999999999", [7], "out of range"),
        (f"MIG-{UUIDS[5]}/1/0,MIG-{UUIDS[5]}/1/0", [], "repeated"),
    ],
)
def test_first_bad_entry_ends_the_list(value: str, expected: list[int], why: str) -> None:
    """visible_device_ids(): the old split at commas shows entries that CUDA does not get to."""
    assert cards_of(value) == expected
    shown = resolve_visible(CARDS, {"CUDA_VISIBLE_DEVICES": value}, find_mig_parent=find_no_parent)
    assert why in shown.stopped
    assert len(old_visible_device_ids(value)) > len(shown.devices)


def test_number_may_have_letters_behind_it() -> None:
    """visible_device_ids(): CUDA reads a number as strtoul does, where int() of the old entry fails."""
    assert cards_of("1gpu2,2ampere") == [1, 2]
    with pytest.raises(ValueError, match="1gpu2"):
        int(old_visible_device_ids("1gpu2,2ampere")[0])


def test_physical_device_id_is_the_card_of_the_rank() -> None:
    """physical_device_id(local_rank): with CUDA_VISIBLE_DEVICES=4,5 rank 0 is card 4, not card 0."""
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert [physical_device_id(rank, environ, cards=CARDS) for rank in (0, 1)] == ["4", "5"]
    old_cores = [range(rank * 8, (rank + 1) * 8) for rank in (0, 1)]
    right_cores = [range(card * 8, (card + 1) * 8) for card in (4, 5)]
    assert set(old_cores).isdisjoint(right_cores)


def test_two_services_have_different_cards() -> None:
    """gpu_id: with TP=4 and DP=2 the local ranks of both copies are the same, and their cards are not."""
    first = [
        physical_device_id(r, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, cards=CARDS) for r in range(4)
    ]
    second = [
        physical_device_id(r, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, cards=CARDS) for r in range(4)
    ]
    assert (first, second) == (["0", "1", "2", "3"], ["4", "5", "6", "7"])


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_rank_outside_is_an_index_error(rank: int) -> None:
    """physical_device_id(local_rank): outside is an IndexError, also where a list would count from its end."""
    with pytest.raises(IndexError, match=rf"local rank {rank} has no device") as caught:
        physical_device_id(rank, {"CUDA_VISIBLE_DEVICES": "4,5"}, cards=CARDS)
    assert isinstance(caught.value, RankError)
    assert "visible by CUDA_VISIBLE_DEVICES: 4,5" in caught.value.message
    if rank < 0:
        assert old_visible_device_ids("4,5")[rank] == "5"


def test_rank_behind_a_bad_entry_says_which() -> None:
    """physical_device_id(local_rank): the error says at which entry the runtime stopped."""
    with pytest.raises(
        RankError, match=r"visible by CUDA_VISIBLE_DEVICES: 0 \('9' is out of range"
    ):
        physical_device_id(1, {"CUDA_VISIBLE_DEVICES": "0,9,1"}, cards=CARDS)
    with pytest.raises(RankError, match=r"local rank 0 has no device: visible: none"):
        physical_device_id(0, {}, cards=())


@pytest.mark.parametrize(
    "value, card",
    [(UUIDS[6], "6"), ("GPU-6b", "5"), (f"MIG-{UUIDS[3]}/7/0", "3"), ("-0,2", None), ("3", "3")],
)
def test_which_numa_gets_a_number(value: str, card: str | None) -> None:
    """which_numa(i_gpu): int() of a UUID fails; the physical id is always a number of a card."""
    environ = {"CUDA_VISIBLE_DEVICES": value}
    if card is None:
        with pytest.raises(RankError):
            physical_device_id(0, environ, cards=CARDS)
        return
    assert physical_device_id(0, environ, cards=CARDS) == card
    if not value.isdigit():
        with pytest.raises(ValueError, match="invalid literal"):
            int(old_visible_device_ids(value)[0])


MIG = "MIG-d9a47cfb-d1f2-d08c-b40e-0812b597ae69"


def test_mig_uuid_is_translated() -> None:
    """A MIG instance's own UUID becomes its card by what NVML says, and is visible without that."""
    environ = {"CUDA_VISIBLE_DEVICES": f"{MIG},{MIG}x"}
    shown = resolve_visible(
        CARDS, environ, find_mig_parent={MIG: UUIDS[3], f"{MIG}x": UUIDS[3]}.get
    )
    assert [(one.card, one.is_partition) for one in shown.devices] == [(CARDS[3], True)] * 2
    assert [card_of_rank(shown, rank).address for rank in (0, 1)] == [CARDS[3].address] * 2


def test_mig_uuid_that_nothing_translates_is_refused() -> None:
    """Where NVML can't tell, a MIG instance is visible, and its card is an error with the reason."""
    shown = resolve_visible(CARDS, {"CUDA_VISIBLE_DEVICES": MIG}, find_mig_parent=find_no_parent)
    assert [one.entry for one in shown.devices] == [MIG]
    with pytest.raises(
        UnknownDeviceError, match="does not say which of 8 cards it is on, nor does NVML"
    ):
        card_of_rank(shown, 0)


def test_mig_uuid_on_the_only_card() -> None:
    """Where there is one card, a MIG instance is on it."""
    environ = {"CUDA_VISIBLE_DEVICES": MIG}
    assert physical_device_id(0, environ, cards=CARDS[:1]) == "0"


def test_uuid_of_cards_without_uuids_is_unknown() -> None:
    """Where the driver has not said a card's UUID, a UUID that is nobody else's is not taken for wrong."""
    cards = (*CARDS[:2], make_card(2))
    shown = resolve_visible(cards, {"CUDA_VISIBLE_DEVICES": f"{UUIDS[0]},{UUIDS[5]}"})
    assert card_of_rank(shown, 0) == CARDS[0]
    with pytest.raises(UnknownDeviceError, match="the UUIDs of cards 2 are not known"):
        card_of_rank(shown, 1)


def test_numbers_mean_nothing_in_cudas_own_order() -> None:
    """CUDA's default order is fastest first, so among cards that differ a number names no card."""
    cards = (make_card(0, uuid=UUIDS[0], model="NVIDIA L4"), make_card(1, uuid=UUIDS[1]))
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
        with pytest.raises(UnknownDeviceError, match=r"differ \(NVIDIA H100, NVIDIA L4\)"):
            physical_device_id(0, environ, cards=cards)
        by_pci = {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert physical_device_id(0, by_pci, cards=cards) == "0"
    assert physical_device_id(0, {"CUDA_VISIBLE_DEVICES": UUIDS[1]}, cards=cards) == "1"


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, list(range(8))),
        ("1,2,3", [1, 2, 3]),
        ("", []),
        ("-1", []),
        ("1, 2,3", [1]),
        ("1,3,8", [1, 3]),
        ("1,3,2", [1, 3]),
        ("1,1", [1]),
        ("1,GPU-0", [1]),
    ],
)
def test_ascend_reads_plain_ascending_numbers(value: str | None, expected: list[int]) -> None:
    """ASCEND_RT_VISIBLE_DEVICES: the first entry that is no plain ascending number ends it."""
    assert cards_of(value, "ascend") == expected


def test_ascend_takes_cudas_variable_alone() -> None:
    """Where only CUDA_VISIBLE_DEVICES is set it counts for Ascend, and where both are it does not."""
    assert cards_of(None, "ascend", CUDA_VISIBLE_DEVICES="4,5") == [4, 5]
    assert cards_of("1", "ascend", CUDA_VISIBLE_DEVICES="4,5") == [1]


@pytest.mark.parametrize(
    "rocr, hip, cuda, expected",
    [
        (None, None, None, list(range(8))),
        ("4,5,6", None, None, [4, 5, 6]),
        ("4,5,6", "2,0", None, [6, 4]),
        ("4,5,6", None, "1", [5]),
        ("4,5,6", "", "1", [5]),
        ("", "0", None, []),
        (None, "", "", list(range(8))),
        (None, "-1", None, []),
        ("4,4,5", None, None, [4]),
        (None, "4,4,5", None, [4, 5]),
        (None, "4, 5", None, [4]),
        (None, "04", None, []),
        ("4, 5", None, None, [4, 5]),
        ("gpu-a0a1000000000002,0", None, None, [2, 0]),
        ("GPU-A0A1", None, None, []),
        (None, "GPU-a0a1", None, [2]),
        ("GPU-", None, None, []),
        ("GPU-a0a1000000000002ff", None, None, []),
    ],
)
def test_amd_reads_two_levels(
    rocr: str | None, hip: str | None, cuda: str | None, expected: list[int]
) -> None:
    """ROCR_VISIBLE_DEVICES chooses cards, HIP_VISIBLE_DEVICES or CUDA's among those, each in its own way."""
    values = {"ROCR_VISIBLE_DEVICES": rocr, "CUDA_VISIBLE_DEVICES": cuda}
    others = {name: value for name, value in values.items() if value is not None}
    assert cards_of(hip, "amd", **others) == expected


def test_other_kinds_are_no_cards_of_this_one() -> None:
    """Cards of other kinds on the machine do not count, and an unknown kind is an error."""
    assert visible_device_ids({}, cards=(*AMDS, *CARDS[:2])) == ("0", "1")
    with pytest.raises(InputError, match="accelerator kind 'abacus': expected nvidia, ascend, amd"):
        visible_device_ids({}, cards=CARDS, kind="abacus")


def old_assign(rank: int, devices_per_rank: int, offset: int, count: int) -> list[str]:
    """assign_visible_devices() of deep_cluster, as ENGINE.md describes it."""
    start = offset + rank % (count // devices_per_rank) * devices_per_rank
    return [str(device) for device in range(start, start + devices_per_rank)]


EIGHT = tuple(str(index) for index in range(8))


@pytest.mark.parametrize(
    "rank, devices_per_rank, offset, expected",
    [
        (0, 1, 0, ["0"]),
        (3, 2, 0, ["6", "7"]),
        (4, 2, 0, ["0", "1"]),
        (1, 2, 4, ["6", "7"]),
        (9, 8, 0, list(EIGHT)),
    ],
)
def test_assign_visible_devices(
    rank: int, devices_per_rank: int, offset: int, expected: list[str]
) -> None:
    """assign_visible_devices(): consecutive cards, ranks wrapping around the groups, as it always was."""
    assert list(assign_visible_devices(rank, devices_per_rank, offset, ids=EIGHT)) == expected
    assert old_assign(rank, devices_per_rank, offset, 8) == expected


def test_offset_past_the_last_card_is_refused() -> None:
    """assign_visible_devices(): the old offset led to cards 8 and 9 of 8; here it is an error."""
    assert old_assign(2, 2, 4, 8) == ["8", "9"]
    with pytest.raises(InputError, match="rank 2 would have devices 8 to 9 of 8"):
        assign_visible_devices(2, 2, 4, ids=EIGHT)


def test_assigned_devices_are_visible_ones() -> None:
    """assign_visible_devices(): the old one gives cards 0 and 1 to a process that sees 4 to 7."""
    ids = visible_device_ids({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, cards=CARDS)
    assert old_assign(0, 2, 0, len(ids)) == ["0", "1"]
    assert assign_visible_devices(0, 2, ids=ids) == ("4", "5")


@pytest.mark.parametrize(
    "rank, devices_per_rank, offset, count, message",
    [
        (0, 3, 0, 8, "8 devices can't be divided among ranks of 3"),
        (0, 1, 0, 0, "0 devices can't be divided"),
        (-1, 1, 0, 8, "rank -1, 1 devices a rank, offset 0"),
        (0, 0, 0, 8, "rank 0, 0 devices a rank"),
        (0, 1, -1, 8, "offset -1"),
    ],
)
def test_assignment_that_does_not_go_is_refused(
    rank: int, devices_per_rank: int, offset: int, count: int, message: str
) -> None:
    """assign_visible_devices(): a count that does not divide, and negative numbers, are errors."""
    with pytest.raises(InputError, match=message):
        assign_visible_devices(rank, devices_per_rank, offset, ids=EIGHT[:count])


def test_set_visible_devices_sets_the_order_too() -> None:
    """set_visible_devices(): card numbers are PCI numbers, so CUDA is told to count so."""
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "PATH": "/bin"}
    done = set_visible_devices([4, 5], environ, "nvidia")
    assert done == {"CUDA_VISIBLE_DEVICES": "4,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environ == {**done, "PATH": "/bin"}
    assert cards_of(None, **environ) == [4, 5]


@pytest.mark.parametrize(
    "kind, before, ids, expected",
    [
        ("nvidia", {}, ["0"], {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (
            "ascend",
            {"CUDA_VISIBLE_DEVICES": "7"},
            ["1", "2"],
            {"ASCEND_RT_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1,2"},
        ),
        ("amd", {}, ["3"], {"HIP_VISIBLE_DEVICES": "3"}),
        (
            "amd",
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            ["1"],
            {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"},
        ),
        ("amd", {"ROCR_VISIBLE_DEVICES": "4,5"}, ["5"], {"ROCR_VISIBLE_DEVICES": "5"}),
        (
            "amd",
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"},
            ["1"],
            {"HIP_VISIBLE_DEVICES": "1"},
        ),
    ],
)
def test_set_visible_devices_by_kind(
    kind: str, before: dict[str, str], ids: list[str], expected: dict[str, str]
) -> None:
    """set_visible_devices(): the variable that decides is set, and those that must agree with it."""
    environ = dict(before)
    assert set_visible_devices(ids, environ, kind) == expected
    assert environ == {**before, **expected}


@pytest.mark.parametrize("kind", ["nvidia", "ascend", "amd"])
@pytest.mark.parametrize("ids", [(), ("2",), ("2", "5")])
def test_what_is_set_is_what_is_visible(kind: str, ids: tuple[str, ...]) -> None:
    """set_visible_devices(): whatever was set reads back as those devices and no others."""
    environ: dict[str, str] = {}
    set_visible_devices(ids, environ, kind)
    assert cards_of(None, kind, **environ) == [int(one) for one in ids]


@pytest.mark.parametrize(
    "ids, kind, message",
    [
        (["1,2"], "nvidia", "'1,2' is no device id"),
        ([""], "amd", "'' is no device id"),
        ([" 1"], "nvidia", "' 1' is no device id"),
        (["2", "1"], "ascend", "numbers in ascending order only"),
        ([UUIDS[0]], "ascend", "numbers in ascending order only"),
    ],
)
def test_id_that_would_not_survive_is_refused(ids: list[str], kind: str, message: str) -> None:
    """set_visible_devices(): an id that the runtime would read as another, or as none, is an error."""
    environ: dict[str, str] = {}
    with pytest.raises(InputError, match=message):
        set_visible_devices(ids, environ, kind)
    assert environ == {}


INTELS = tuple(make_card(index, "intel", model=None) for index in range(4))
COMPOSITE = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, [0, 1, 2, 3]),
        ("", [0, 1, 2, 3]),
        ("2", [2]),
        ("3,1", [1, 3]),
        ("1.0,1.1", [1, 1]),
        ("2,2", [2]),
        ("1.x", []),
        ("9", []),
    ],
)
def test_level_zeros_mask_chooses_and_does_not_order(
    value: str | None, expected: list[int]
) -> None:
    """ZE_AFFINITY_MASK names cards or tiles, empty is all, and the order stays the runtime's."""
    environ = {} if value is None else {"ZE_AFFINITY_MASK": value}
    shown = resolve_visible(INTELS, environ)
    assert [one.card and one.card.index for one in shown.devices] == expected


def test_tiles_are_not_taken_for_cards() -> None:
    """Where Level Zero counts tiles for devices a number does not say the card, and is refused by name."""
    names = {card.name for card in INTELS}
    environ = {"ZE_AFFINITY_MASK": "2"}
    with pytest.raises(UnknownDeviceError, match="ZE_FLAT_DEVICE_HIERARCHY is not COMPOSITE"):
        card_of_rank(resolve_visible(INTELS, environ, tiled=names), 0)
    found = card_of_rank(resolve_visible(INTELS, {**environ, **COMPOSITE}, tiled=names), 0)
    assert found.index == 2


def test_intels_devices_are_set_by_card() -> None:
    """set_visible_devices() of Intel's cards has them counted by card and in PCI order."""
    environ: dict[str, str] = {}
    done = set_visible_devices([1, 3], environ, "intel")
    assert done == {"ZE_AFFINITY_MASK": "1,3", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", **COMPOSITE}
    with pytest.raises(InputError, match="can't hide them all"):
        set_visible_devices([], environ, "intel")


def test_first_kind_is_meant_where_there_are_several() -> None:
    """Without a word on the kind an NPU goes before a GPU, NVIDIA's before another's; no card is no device."""
    assert resolve_visible((*CARDS, *NPUS), {}).kind == "ascend"
    assert resolve_visible((*AMDS, *CARDS), {}).kind == "nvidia"
    empty = resolve_visible((), {})
    assert (empty.kind, empty.devices) == ("cpu", ())
