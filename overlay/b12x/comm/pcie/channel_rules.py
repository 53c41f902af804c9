# SPDX-License-Identifier: Apache-2.0
"""What a pool of PCIe channels decides without a device: its catalog of ids, and what a checkpoint means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def normalized_group(group: str | None, *, single: bool, factory: object) -> str | None:
    """A replay group's name, checked; None for none.

    Raises:
        TypeError, ValueError: a name that is not a string, or is empty.
        ValueError: a pool that has no channel for each id: there is nothing to share.
    """
    if group is None:
        return None
    if not isinstance(group, str):
        raise TypeError(f"replay_group is {group!r}; wanted a string or None")
    if not group.strip():
        raise ValueError("replay_group is empty; wanted a name that all ranks use, or None")
    if single or factory is not None:
        kind = "has one channel for everything" if single else "makes its channels by channel_factory"
        raise ValueError(f"replay_group {group!r} on a pool that {kind}; leave it out")
    return group.strip()


def in_group(group: str | None) -> dict[str, str]:
    """The keyword that passes a replay group on; none for none, to a runtime that knows no groups."""
    return {} if group is None else {"replay_group": group}


@dataclass
class Catalog:
    """Named channels and their groups: views of a pool's own containers.

    Attributes:
        channels: id to channel; ids of one group have the same.
        groups: id to replay group, for ids that have one.
    """

    channels: dict[str, Any]
    groups: dict[str, str]

    def channel_of_group(self, group: str) -> Any:
        """The group's channel; None for a new group."""
        return next((self.channels[name] for name, other in self.groups.items() if other == group), None)

    def require_joinable(self, ids: Iterable[str], group: str | None, *, known_without_group: bool = False) -> None:
        """Refuse an id that is in the catalog in another group (or none).

        Args:
            known_without_group: no group asked for means whatever the catalog says.
        """
        for name in ids:
            if name not in self.channels or (known_without_group and group is None):
                continue
            has = self.groups.get(name)
            if has != group:
                raise ValueError(
                    f"logical channel {name!r} is prepared in replay group {has!r}, and {group!r} is asked for; a "
                    "graph stays in the group that it was prepared in"
                )

    def state(self, ids: tuple[str, ...], group: str | None) -> tuple[object, ...]:
        """What ranks compare before an allocation."""
        known = tuple(sorted(self.channels))
        grouped = tuple(sorted(self.groups.items()))
        return (ids, known) if group is None and not grouped else (ids, known, group, grouped)

    def add(self, name: str, group: str | None, channel: Any) -> None:
        self.channels[name] = channel
        if group is not None:
            self.groups[name] = group

    def require_releasable(self, names: Sequence[str], single: str) -> None:
        for name in names:
            if name == single:
                raise RuntimeError("the one channel of a single-channel pool lives as long as the pool; call close()")
            if name not in self.channels:
                raise RuntimeError(
                    f"logical channel {name!r} is not prepared, so there is nothing to release; prepared are "
                    f"{sorted(self.channels)}"
                )

    def used_only_by(self, names: Iterable[str]) -> list[Any]:
        """Channels that no id but these refers to, each once, in the order of the ids."""
        gone = set(names)
        kept = {id(channel) for name, channel in self.channels.items() if name not in gone}
        found = {id(self.channels[name]): self.channels[name] for name in sorted(gone)}
        return [channel for key, channel in found.items() if key not in kept]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            del self.channels[name]
            self.groups.pop(name, None)

    def clear(self) -> None:
        self.channels.clear()
        self.groups.clear()


class Checkpoint(tuple[Any, ...]):
    """A pool at one moment: (number of channels, aliases, named channels, captured ids), as upstream's callers know it.

    Attributes:
        channels: the channels themselves.
        aliases: stream key to channel.
        catalog: named channels and groups.
        captured: ids of captured graphs.
        bindings: the stream that each channel was bound to; None if that is not known.
        owner: the pool.
        releases: how often each id had been released.
    """

    channels: tuple[Any, ...]
    aliases: dict[int, Any]
    catalog: Catalog
    captured: set[str]
    bindings: tuple[int | None, ...] | None
    owner: Any
    releases: dict[str, int]

    @classmethod
    def of(
        cls,
        owner: Any,
        channels: Sequence[Any],
        aliases: Mapping[int, Any],
        catalog: Catalog,
        captured: Iterable[str],
        releases: Mapping[str, int],
    ) -> Checkpoint:
        made = cls((len(channels), dict(aliases), dict(catalog.channels), set(captured)))
        made.owner, made.channels, made.aliases = owner, tuple(channels), dict(aliases)
        made.catalog = Catalog(dict(catalog.channels), dict(catalog.groups))
        made.captured, made.releases = set(captured), dict(releases)
        made.bindings = tuple(getattr(channel, "_owner_stream_key", None) for channel in channels)
        return made

    @classmethod
    def read(cls, given: tuple[Any, ...], now: Checkpoint) -> Checkpoint:
        """A checkpoint of any release: of 2 values (channels and aliases only) or of 4.

        Args:
            now: the pool as it is.

        Raises:
            ValueError: another shape, another pool, more channels than the pool has, or a plain tuple after a release.
        """
        if isinstance(given, Checkpoint):
            if given.owner is not now.owner:
                raise ValueError("the checkpoint is of another pool; wanted one that this pool gave")
            return given
        if len(given) not in (2, 4):
            raise ValueError(f"invalid channel checkpoint: {len(given)} values; wanted what checkpoint_channels() gave")
        count, aliases = given[:2]
        if not 0 <= count <= len(now.channels):
            raise ValueError(
                f"the checkpoint is of another pool or of a later moment: {count} channels then, "
                f"{len(now.channels)} now"
            )
        # Numbers do not say which channels remain.
        if now.releases:
            raise ValueError(
                "a plain channel checkpoint does not say which channels it means once some have been released; "
                "wanted the object that checkpoint_channels() gave"
            )
        gone = now.channels[count:]
        named, captured = given[2:] if len(given) == 4 else (now.catalog.channels, now.captured)
        kept = {name: channel for name, channel in named.items() if not is_among(channel, gone)}
        groups = {name: group for name, group in now.catalog.groups.items() if name in kept}
        made = cls.of(now.owner, now.channels[:count], aliases, Catalog(kept, groups), captured, now.releases)
        made.captured -= set(named) - set(kept)
        made.bindings = None
        return made

    def without_released(self, now: Checkpoint) -> Checkpoint:
        """The same moment without what has been released since, prepared again or not.

        Args:
            now: the pool as it is.
        """
        kept = [channel for channel in self.channels if is_among(channel, now.channels)]
        gone = [channel for channel in self.channels if not is_among(channel, kept)]
        dropped = {name for name, count in now.releases.items() if count != self.releases.get(name, 0)}
        named = {
            name: channel
            for name, channel in self.catalog.channels.items()
            if name not in dropped and not is_among(channel, gone)
        }
        groups = {name: group for name, group in self.catalog.groups.items() if name in named}
        aliases = {key: channel for key, channel in self.aliases.items() if not is_among(channel, gone)}
        made = Checkpoint.of(self.owner, kept, aliases, Catalog(named, groups), self.captured, now.releases)
        made.captured -= set(self.catalog.channels) - set(named)
        if self.bindings is not None:
            bound = zip(self.channels, self.bindings, strict=True)
            made.bindings = tuple(binding for channel, binding in bound if is_among(channel, kept))
        else:
            made.bindings = None
        return made

    def restore_bindings(self) -> None:
        for channel, binding in zip(self.channels, self.bindings or (), strict=False):
            if hasattr(channel, "_owner_stream_key"):
                channel._owner_stream_key = binding


def is_among(channel: Any, channels: Iterable[Any]) -> bool:
    """Whether this very channel is one of them."""
    return any(channel is other for other in channels)
