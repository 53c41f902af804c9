# SPDX-License-Identifier: Apache-2.0
"""A pool's named channels: which ids exist, what they share, and how ranks agree on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from .channel_agreements import require_alike
from .channel_rules import Catalog, normalized_group


class NamedChannels:
    """Channels by semantic id.

    A subclass sets, before any of these methods is called, ``device``, ``exchange_group``, ``single_channel``,
    ``_channel_factory``, ``_closed`` and the containers below, and makes channels in ``_new_channel``.

    Class keywords:
        owner: the pool's name in messages.
        closed: what a closed pool says.
        scope_required: whether a CUDA capture outside of any capture scope is refused.
    """

    device: Any
    exchange_group: Any
    single_channel: bool
    _channel_factory: Any
    _closed: bool
    _all_channels: list[Any]
    _channels: dict[int, Any]
    _logical_channels: dict[str, Any]
    _captured_channel_ids: set[str]
    _capture_channel_stack: list[Any]
    _replay_groups: dict[str, str]

    _seams: ClassVar[Any] = None
    _owner: ClassVar[str] = ""
    _closed_message: ClassVar[str] = ""
    _scope_required: ClassVar[bool] = True

    def __init_subclass__(
        cls, *, owner: str = "", closed: str = "", scope_required: bool | None = None, **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if owner:
            # Host exchanges and stream queries are the pool's own module's.
            cls._seams = sys.modules[cls.__module__]
            cls._owner, cls._closed_message = owner, closed
        if scope_required is not None:
            cls._scope_required = scope_required

    def _new_channel(self, stream_key: int | None) -> Any:
        raise NotImplementedError

    def _catalog(self) -> Catalog:
        return Catalog(self._logical_channels, self.__dict__.setdefault("_replay_groups", {}))

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed_message)

    def _agreed(self, what: str, local: Any) -> Any:
        """The result of a local step that may fail; a failure on one rank is an error on all of them."""
        if self._channel_factory is not None:
            return local()
        return self._seams._run_collective_preallocation_setup(
            owner=f"{self._owner} {what}", exchange_group=self.exchange_group, setup=local
        )

    def prepare_channels(self, channel_ids: Sequence[str], *, replay_group: str | None = None) -> None:
        """Make the channels of these ids that do not exist; collective.

        Args:
            channel_ids: semantic ids, the same set on every rank, in any order.
            replay_group: all of these ids share the group's one channel. The caller promises that their graphs are
                never in flight together, and that all ranks replay them in the same order.

        Raises:
            RuntimeError: on every rank, before anything is allocated, if ids, groups or catalogs differ.
            ValueError: an id that already belongs elsewhere (within a RuntimeError where ranks agree on it).
        """

        def checked() -> tuple[tuple[str, ...], str | None]:
            self._require_open()
            ids = sorted({self._seams._normalize_logical_channel_id(value) for value in channel_ids})
            group = normalized_group(replay_group, single=self.single_channel, factory=self._channel_factory)
            self._catalog().require_joinable(ids, group)
            return tuple(ids), group

        ids, group = self._agreed("logical channel validation", checked)
        if self._channel_factory is None:
            require_alike(
                self._exchange,
                self._catalog().state(ids, group),
                f"{self._owner} logical channel preparation differs across ranks "
                "(ids, catalog and replay groups by rank)",
                "every rank has to prepare the same ids in the same groups",
            )
        for name in ids:
            if name not in self._logical_channels:
                self._add(name, group)

    def _add(self, name: str, group: str | None) -> None:
        catalog = self._catalog()
        channel = None if group is None else catalog.channel_of_group(group)
        catalog.add(name, group, self._new_channel(None) if channel is None else channel)

    def _exchange(self, state: object) -> Sequence[object]:
        """An object of every rank; collective."""
        gathered: Sequence[object] = self._seams._broadcast_gather_object(state, self.exchange_group)
        return gathered
