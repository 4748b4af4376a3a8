"""Which GPUs CUDA_VISIBLE_DEVICES makes visible. CUDA says nothing of an entry that it does not take: it hides what follows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "NoDevFiles"
"""What Slurm sets for a job without GPUs."""

END = re.compile("-0*[1-9][0-9]*")
"""An entry that ends the list on purpose, as in the documentation; -1 alone is the usual idiom for no GPU at all."""

KINDS = {"GPU-": "a UUID", "MIG-": "a MIG instance", "": "an index"}


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A device that CUDA sees.

    Attributes:
        index: NVML's; None where it is not known: of a MIG instance that is named by a UUID of its own, or without a driver.
        uuid: the GPU's, whole; empty where the driver does not tell it.
        entry: what CUDA_VISIBLE_DEVICES calls it.
    """

    index: int | None
    uuid: str
    entry: str
    is_mig: bool = False


@dataclass(frozen=True, slots=True)
class Visible:
    """What CUDA sees, in its order.

    Attributes:
        problem: what is wrong with an entry, and which GPUs there are; empty where all entries are valid.
        is_hidden: the variable hides all GPUs on purpose.
    """

    gpus: tuple[VisibleGpu, ...] = ()
    problem: str = ""
    is_hidden: bool = False


class _Invalid(ValueError):
    """An entry that CUDA does not take; says why."""


def parse(text: str | None, uuids: Mapping[int, str] | None) -> Visible:
    """The GPUs that CUDA_VISIBLE_DEVICES makes visible, by CUDA's rules; never raises.

    CUDA reads from left to right and stops at the first entry that is not valid: what comes before it is visible. A device that
    is named twice makes all of them invisible. Indices, UUIDs and MIG instances cannot be mixed. An index that begins with digits
    and goes on otherwise ("0;1") CUDA reads up to there; here it counts as not valid, since nobody means it. Of MIG instances a
    process can use one alone.

    Args:
        text: the variable's; None where it is not set.
        uuids: of the machine's GPUs, by NVML's index; None where there is nobody to ask. Then what is well formed is believed.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA MIG User Guide, "CUDA_VISIBLE_DEVICES";
        torch.cuda._parse_visible_devices, which was held against the driver, for the entries that are named twice or mixed.
    """
    if text is None:
        return Visible(tuple(VisibleGpu(index, uuid, str(index)) for index, uuid in sorted((uuids or {}).items())))
    entries = [entry.strip() for entry in text.split(",")]
    if not entries[-1]:
        entries.pop()  # a comma at the end, or nothing at all
    if not any(entries) or entries[0] == NO_GPU or END.fullmatch(entries[0]):
        return Visible(is_hidden=True)
    devices: list[VisibleGpu] = []
    problem, kind = "", _kind(entries[0])
    for entry in entries:
        if END.fullmatch(entry):
            break
        try:
            device = _device(entry, kind, uuids)
        except _Invalid as error:
            problem = f"{error}; {_names_of(uuids)}"
            break
        if any(_is_same(device, other) for other in devices):
            return Visible(
                problem=f"{entry!r} names a device for the second time, and CUDA then sees none; {_names_of(uuids)}"
            )
        devices.append(device)
    return Visible(tuple(devices[:1] if kind == "MIG-" else devices), problem)


def _kind(entry: str) -> str:
    return entry[:4] if entry[:4] in KINDS else ""


def _device(entry: str, kind: str, uuids: Mapping[int, str] | None) -> VisibleGpu:
    """Raises: _Invalid."""
    if _kind(entry) != kind:
        raise _Invalid(f"{entry!r} is not {KINDS[kind]} like the first entry, and CUDA takes one kind alone")
    if kind == "MIG-":
        return _mig_instance(entry, uuids)
    if kind == "GPU-":
        return VisibleGpu(None, entry, entry) if uuids is None else VisibleGpu(*_by_uuid(entry, uuids), entry)
    if not re.fullmatch("[+-]?[0-9]{1,9}", entry):
        raise _Invalid(f"{entry!r} is neither the index nor the UUID of a GPU")
    index = int(entry)
    if uuids is not None and index not in uuids:
        raise _Invalid(f"there is no GPU {index}")
    return VisibleGpu(index, (uuids or {}).get(index, ""), entry)


def _mig_instance(entry: str, uuids: Mapping[int, str] | None) -> VisibleGpu:
    """By its own UUID, or as drivers before 470 have it: MIG-<UUID of the GPU>/<GPU instance>/<compute instance>.

    Raises: _Invalid.
    """
    if uuids == {}:
        raise _Invalid(f"there is no GPU for {entry!r}")
    match = re.fullmatch("MIG-(?:(GPU-[^/]+)/[0-9]+/[0-9]+|(?!GPU-)[^/]+)", entry)
    if not match:
        raise _Invalid(f"{entry!r} is neither MIG-<UUID> nor MIG-<UUID of the GPU>/<GPU instance>/<compute instance>")
    if match[1] is None or uuids is None:
        return VisibleGpu(None, match[1] or "", entry, is_mig=True)
    return VisibleGpu(*_by_uuid(match[1], uuids), entry, is_mig=True)


def _by_uuid(prefix: str, uuids: Mapping[int, str]) -> tuple[int, str]:
    """Index and whole UUID. Raises: _Invalid."""
    matches = [(index, uuid) for index, uuid in uuids.items() if uuid.startswith(prefix)]
    if not matches:
        raise _Invalid(f"no GPU has a UUID that begins with {prefix!r}")
    if len(matches) > 1:
        raise _Invalid(f"{prefix!r} is the beginning of {len(matches)} UUIDs")
    return matches[0]


def _names_of(uuids: Mapping[int, str] | None) -> str:
    names = ", ".join(f"{index} ({uuid})" if uuid else str(index) for index, uuid in sorted((uuids or {}).items()))
    return f"the GPUs of this machine: {names or 'none is known'}"


def _is_same(one: VisibleGpu, other: VisibleGpu) -> bool:
    if one.is_mig or one.index is None:
        return one.entry == other.entry
    return one.index == other.index


def indices(known: Iterable[int], names: Mapping[int, str], text: str | None) -> list[int]:
    """NVML's indices of the GPUs that CUDA sees, ascending; all of them where it sees a MIG instance of one that is not known."""
    uuids = {index: names.get(index, "") for index in known}
    visible = parse(text, uuids).gpus
    if any(gpu.index is None for gpu in visible):
        return sorted(uuids)
    return sorted(index for index in uuids if any(gpu.index == index for gpu in visible))
