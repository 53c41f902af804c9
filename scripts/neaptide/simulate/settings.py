"""Settings of the caching allocator, and the sizes that follow from them.

Numbers and rules are those of torch 2.11 (``c10/core/AllocatorConfig``, ``c10/cuda/CUDACachingAllocator``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from neaptide.errors import NeaptideError

MIB, GIB = 1 << 20, 1 << 30
BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_STEP_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
UNBOUNDED = (1 << 64) - 1
# Divisions of a power of two are set for each power from 1 MiB to 32 GiB; sizes beyond take the nearest.
DIVISION_INTERVALS = 16
IGNORED = ("backend", "release_lock_on_cudamalloc", "throw_on_cudamalloc_oom", "graph_capture_record_stream_reuse")


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Settings:
    """What ``PYTORCH_ALLOC_CONF`` sets, in bytes.

    Attributes:
        divisions: steps between two powers of two that a request is rounded up to, by power from 1 MiB on; 0 and 1
            leave whole units of 512 B.
        max_split_bytes: blocks of this size and more are not split, and serve only requests of this size and more.
        max_non_split_rounding_bytes: what such a block may be larger than its request.
        large_segment_bytes: a segment for requests between 1 and 10 MiB; also what a large pool maps at a time.
        collect_above: fraction of the limit above which old cached blocks are released first; 0 for never.
    """

    expandable: bool = False
    divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    max_split_bytes: int = UNBOUNDED
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    collect_above: float = 0.0

    def rounded(self, size_bytes: int) -> int:
        """Bytes of the block that serves a request."""
        if size_bytes < BLOCK_BYTES:
            return BLOCK_BYTES
        power = size_bytes.bit_length() - 1
        divisions = self.divisions[min(max(power - 20, 0), DIVISION_INTERVALS - 1)]
        if divisions <= 1 or size_bytes <= BLOCK_BYTES * divisions:
            return round_up(size_bytes, BLOCK_BYTES)
        return round_up(size_bytes, (1 << power) // divisions)

    def segment_bytes(self, block_bytes: int) -> int:
        """Bytes that are asked of the driver for a block that no cached one serves."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, SEGMENT_STEP_BYTES)

    def granule_bytes(self, small: bool) -> int:
        """What an expandable segment maps at a time."""
        return SMALL_SEGMENT_BYTES if small else self.large_segment_bytes

    def splits(self, free_bytes: int, block_bytes: int, small: bool) -> bool:
        """Whether a free block is cut when it serves ``block_bytes``; else the request gets all of it."""
        rest = free_bytes - block_bytes
        if small or self.expandable:
            return rest >= BLOCK_BYTES
        return block_bytes < self.max_split_bytes and rest > SMALL_BYTES

    def serves(self, free_bytes: int, block_bytes: int) -> bool:
        """Whether the best fit may be taken: oversize blocks are kept for oversize requests of about their size."""
        if block_bytes < self.max_split_bytes:
            return free_bytes < self.max_split_bytes
        return free_bytes < block_bytes + self.max_non_split_rounding_bytes


def parse_settings(text: str) -> Settings:
    """Settings from a value of ``PYTORCH_ALLOC_CONF``; those of the pinned host allocator are left out.

    Raises:
        NeaptideError: a setting or value that PyTorch would refuse, or that is not modelled.
    """
    settings = Settings()
    for name, value in re.findall(r"([^,:\[\]\s]+)\s*:\s*(\[[^\]]*\]|[^,\[\]\s]+)", text):
        settings = _with(settings, name, value)
    left = re.sub(r"([^,:\[\]\s]+)\s*:\s*(\[[^\]]*\]|[^,\[\]\s]+)", "", text).strip(", \t")
    if left:
        raise _refused(left, "NAME:VALUE pairs with commas between them")
    return settings


def _with(settings: Settings, name: str, value: str) -> Settings:
    if name == "expandable_segments" and value in ("True", "False"):
        return replace(settings, expandable=value == "True")
    if name == "roundup_power2_divisions":
        return replace(settings, divisions=_divisions(value))
    if name == "max_split_size_mb":
        return replace(settings, max_split_bytes=_mib(name, value, 20))
    if name == "max_non_split_rounding_mb":
        return replace(settings, max_non_split_rounding_bytes=_mib(name, value, 20))
    if name == "large_segment_size_mb":
        return replace(settings, large_segment_bytes=_mib(name, value, 2))
    if name == "garbage_collection_threshold" and re.fullmatch(r"0?\.\d*[1-9]\d*", value):
        return replace(settings, collect_above=float(value))
    if name.startswith("pinned_") or (name in IGNORED and value != "cudaMallocAsync"):
        return settings
    raise _refused(f"{name}:{value}", "a setting of the native caching allocator")


def _mib(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise _refused(f"{name}:{value}", f"a number of MiB, {least} or more")
    return int(value) * MIB


def _divisions(value: str) -> tuple[int, ...]:
    """One number for every interval, or ``[256:1,512:2,>:4]`` with the intervals' beginnings in MiB."""
    if value.isdecimal():
        return (_power(value, value),) * DIVISION_INTERVALS
    out, last, first = [0] * DIVISION_INTERVALS, 0, True
    for pair in value.strip("[]").split(","):
        begin, _, number = pair.replace(" ", "").partition(":")
        divisions = _power(number, value, least=0)
        if begin == ">":
            out[last + 1 :] = [divisions] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(_power(begin, value).bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:
            out[:last] = [divisions] * last
        out[last], first = divisions, False
    return tuple(out)


def _power(text: str, value: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least or int(text) & (int(text) - 1):
        raise _refused(f"roundup_power2_divisions:{value}", "powers of two")
    return int(text)


def _refused(found: str, wanted: str) -> NeaptideError:
    return NeaptideError(
        f"allocator setting {found}", wanted=wanted, todo="See docs/simulate.md for those that are modelled.",
        where="--settings",
    )  # fmt: skip
