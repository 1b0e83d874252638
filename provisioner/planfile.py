"""plan.json: a plan as text, and back.

The keys are the field names of the plan's values; sets are kernel lists. Reading forgives keys that
it does not know, because a later schema may add some, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from provisioner.errors import EXIT_USAGE, InputError, ParseError, Problem, ProblemsError, shorten
from provisioner.idset import CpuSet, IdSet
from provisioner.plan import Plan, Rank
from provisioner.request import PlacementRequest, ServiceRequest, check_request
from provisioner.topology import Accelerator, Machine

SCHEMA = "provision.plan/1"

_T = TypeVar("_T")


def to_json(value: object) -> Any:
    """The value as JSON's own types: sets as kernel lists, values as objects of their fields."""
    if isinstance(value, IdSet):
        return str(value)
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(one) for one in value]
    return value


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The object that plan.json holds and `provision plan --json` prints."""
    return {"schema": SCHEMA, **to_json(plan)}


def format_plan(plan: Plan) -> str:
    """The text of plan.json; the same plan gives the same bytes."""
    return json.dumps(plan_to_json(plan), indent=1, ensure_ascii=False) + "\n"


def parse_plan(text: str, place: str) -> Plan:
    """The plan that a plan.json holds.

    Args:
        text: its contents.
        place: its name, for messages.

    Raises:
        InputError: it is no JSON, another schema, or a value is of the wrong type.
        ProblemsError: its values contradict each other, as after an edit by hand.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: is no JSON: {error}", "Give the plan.json that provision render wrote"
        ) from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{place}: is no plan: schema is {str(schema)[:60]!r}, expected '{SCHEMA}'",
            "Give the plan.json that provision render wrote",
        )
    plan = decode(raw, Plan, place, "Make the plan again with provision render")
    problems = _check_form(plan)
    _raise(problems, place)
    return plan


def decode(raw: object, kind: type[_T], place: str, hint: str) -> _T:
    """JSON's own types as a value of ours, unknown keys forgiven.

    Raises InputError, with the place of what is of the wrong type.
    """
    import msgspec

    try:
        return msgspec.convert(raw, kind, dec_hook=_decode_set)
    except (msgspec.ValidationError, ParseError) as error:
        raise InputError(f"{place}: {error}", hint) from error


def _decode_set(wanted: type, value: object) -> object:
    if issubclass(wanted, IdSet):
        if not isinstance(value, str):
            raise TypeError(f"expected a list such as '0-3,8', got {type(value).__name__}")
        return wanted.parse_list(value)
    raise NotImplementedError(wanted.__name__)


def _check_form(plan: Plan) -> list[Problem]:
    """What an edit by hand may have broken; unit names are made from names in here."""
    asked = PlacementRequest(
        services=tuple(
            ServiceRequest(name=service.name, devices=("0",), worker=service.worker)
            for service in plan.services
        )
    )
    problems = check_request(asked)

    if not re.fullmatch(r"sha256:[0-9a-f]{64}", plan.fingerprint):
        _refuse(
            problems,
            f"fingerprint is '{shorten(plan.fingerprint)}': expected sha256: and 64 hex digits",
        )
    for service in plan.services:
        where = f"service '{shorten(service.name)}'"
        if service.slice != f"{service.name}.slice":
            _refuse(
                problems,
                f"{where}: slice is '{shorten(service.slice)}': expected '{shorten(service.name)}.slice'",
            )
        for number, rank in enumerate(service.ranks):
            expected = f"{service.name}-rank{number}.slice"
            if rank.rank != number or rank.slice != expected:
                _refuse(
                    problems,
                    f"{where}: rank {rank.rank} has slice '{shorten(rank.slice)}': "
                    f"expected rank {number} with '{shorten(expected)}'",
                )
            if not rank.cpus:
                _refuse(problems, f"{where}: rank {number} has no CPUs: expected at least one")
            if rank.main_cpus | rank.compile_cpus != rank.cpus or not rank.main_cpus.isdisjoint(
                rank.compile_cpus
            ):
                _refuse(
                    problems,
                    f"{where}: rank {number}: main_cpus and compile_cpus are no partition of cpus {rank.cpus}",
                )
            if service.memory != "off" and not rank.memory_nodes:
                _refuse(
                    problems,
                    f"{where}: rank {number} has no memory nodes: expected at least one in mode '{service.memory}'",
                )
    if not plan.reserved_cpus.isdisjoint(plan.unassigned_cpus):
        _refuse(
            problems,
            f"CPUs {plan.reserved_cpus & plan.unassigned_cpus} are in reserved_cpus and in "
            "unassigned_cpus: expected no CPU twice",
        )
    taken: list[tuple[str, CpuSet]] = [
        ("reserved_cpus", plan.reserved_cpus),
        ("unassigned_cpus", plan.unassigned_cpus),
    ]
    for service in plan.services:
        for name, cpus in taken:
            both = cpus & service.cpus
            if both:
                _refuse(
                    problems,
                    f"CPUs {both} are in service '{shorten(service.name)}' and in {name}: expected no CPU twice",
                )
        taken.append((f"service '{shorten(service.name)}'", service.cpus))
    return problems


def check_plan(plan: Plan, machine: Machine, place: str) -> None:
    """Holds a plan that was read against the machine that it is for.

    Raises ProblemsError with everything that an edit by hand has made impossible there; `place` is
    the file's name for messages.
    """
    problems: list[Problem] = []
    cards = {card.name: card for card in machine.accelerators}

    for name, cpus in (
        ("reserved_cpus", plan.reserved_cpus),
        ("unassigned_cpus", plan.unassigned_cpus),
    ):
        if not cpus <= machine.ceiling_cpus:
            _refuse(problems, f"{name} is {cpus}: expected CPUs of {machine.ceiling_cpus}")
    if plan.confine and not plan.system_cpus:
        _refuse(
            problems, "confine is set, and there is no reserved or unassigned CPU to confine to"
        )
    seen: set[str] = set()
    for service in plan.services:
        if not service.ranks:
            _refuse(problems, f"service '{service.name}' has no ranks: expected at least one")
        for rank in service.ranks:
            where = f"service '{service.name}' rank {rank.rank}"
            if not rank.cpus <= machine.ceiling_cpus:
                _refuse(
                    problems,
                    f"{where}: cpus is {rank.cpus}: expected CPUs of {machine.ceiling_cpus}",
                )
            elif rank.main_cores != len(machine.cores_of(rank.main_cpus)):
                _refuse(
                    problems,
                    f"{where}: main_cores is {rank.main_cores}: "
                    f"expected {len(machine.cores_of(rank.main_cpus))}, those of main_cpus",
                )
            if not rank.memory_nodes <= machine.allowed_nodes:
                _refuse(
                    problems,
                    f"{where}: memory_nodes is {rank.memory_nodes}: expected nodes of {machine.allowed_nodes}",
                )
            if not rank.cpu_nodes <= machine.cpu_nodes:
                _refuse(
                    problems,
                    f"{where}: cpu_nodes is {rank.cpu_nodes}: expected nodes of {machine.cpu_nodes}",
                )
            found = [cards.get(device) for device in rank.devices]
            indexes = tuple(card.index for card in found if card is not None)
            vendors = {card.vendor for card in found if card is not None}
            if not found or indexes != rank.device_indexes or vendors != {rank.vendor}:
                _refuse(
                    problems,
                    f"{where}: devices, device_indexes and vendor do not name cards of this machine: "
                    f"found {', '.join(shorten(device) for device in rank.devices) or 'none'}",
                )
            elif not _counts_alike(rank, [card for card in found if card is not None]):
                _refuse(
                    problems,
                    f"{where}: runtime_numbers and device_modules are not those of its cards",
                )
            if seen & set(rank.devices):
                _refuse(
                    problems,
                    f"{where}: a card of it is in another rank too: expected each card once",
                )
            seen |= set(rank.devices)
    _raise(problems, place)


def _counts_alike(rank: Rank, cards: list[Accelerator]) -> bool:
    """Whether the rank's numbers and modules are its cards'.

    An NPU's number may be npu-smi's word, which the machine itself does not give.
    """
    numbers = tuple(number for card in cards for number in card.runtime_numbers)
    modules = tuple(card.module for card in cards if card.module is not None)
    if rank.vendor == "ascend" and len(rank.visible_numbers) == len(numbers):
        numbers = rank.visible_numbers
    return (rank.visible_numbers, rank.device_modules) == (numbers, modules)


def _refuse(problems: list[Problem], message: str) -> None:
    problems.append(Problem("bad_plan", message, "Make the plan again with provision render"))


def _raise(problems: list[Problem], place: str) -> None:
    if problems:
        raise ProblemsError(
            [Problem(one.code, f"{place}: {one.message}", one.hint) for one in problems],
            exit_status=EXIT_USAGE,
        )
