# SPDX-License-Identifier: Apache-2.0
"""What the pools of PCIe channels share: which channel a call, a stream or a graph gets, and how long it lives.

A channel is one IPC slab with its signals. Everything that runs on it is ordered, alike on all ranks. The pools
differ in how they make a channel and in the operations that they offer; the rest is here.

Replay groups: graphs that are never in flight together may share a channel. Their ids stay unique, one for each
graph, and the caller promises that all ranks replay the members of a group in one order, one after another. The channel
lives as long as an id refers to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .channel_lifetimes import OwnedChannels
from .channel_scopes import ScopedChannels


class ChannelPool(ScopedChannels, OwnedChannels):
    """Channels of one collective, by semantic id, by stream and by capture scope; see ``NamedChannels``."""


class NamedSinglePool(ChannelPool):
    """A pool whose one channel is a named one like any other (the DCP exchange)."""

    def _single(self, channel_id: str | None) -> Any:
        if self._channel_factory is not None:
            return super()._single(channel_id)
        name = self._seams._SINGLE_CHANNEL_ID if channel_id is None else channel_id
        channel = self._channels[0] = self._named(name, None, 0)
        return channel


class EnteredPool(ChannelPool):
    """A pool whose channels register what a graph captures (the oneshot all-reduce)."""

    def _entered(self, channel: Any, stream: object) -> AbstractContextManager[Any]:
        entered: AbstractContextManager[Any] = channel.capture(stream=stream)
        return entered
