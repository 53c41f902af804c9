# SPDX-License-Identifier: Apache-2.0
"""What takes part in a capture of CUDA graphs beside the communicators that upstream enters, and captures to be undone.

A *participant* is communicator state that a capture adds to: channels of a pool, for one. It is registered with the
process group whose ranks share it. The ranks of a group make such state together, so its order is alike on all of
them; ranks of several groups make it in one order, too, as one program. Participants are held weakly.

A profiling capture is *disposable*: its graphs are destroyed unused, and what participants made for them goes, too.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.capture_meetings import Meeting, giving_up, group_store
from vllm.logger import init_logger

logger = init_logger(__name__)

# As long as torch.distributed waits for a peer by default; a rank that has failed already wants to say so.
PATIENCE_SECONDS = 1800.0
PATIENCE_AFTER_FAILURE_SECONDS = 60.0
# What GroupCoordinator.graph_capture enters of a device communicator.
CAPTURABLE = ("ca_comm", "fi_pcie_ipc_ar_comm", "aiter_ar_comm")


class CaptureParticipant(Protocol):
    """Communicator state that captures add to."""

    def capture(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """A scope for warm-up and capture on ``stream``, which is current; may be collective."""

    def checkpoint(self) -> None:
        """Remember what is there now, in place of an earlier checkpoint; not collective."""

    def rollback(self) -> None:
        """Free what was made since the checkpoint; collective. If it raises, then on every rank of the group."""


CaptureHook = Callable[[torch.cuda.Stream], AbstractContextManager[object]]


class _Registry:
    """Participants with their groups, in the order of registration.

    Attributes:
        meetings: how often the ranks of each group have met.
        kept: the participants of the disposable scope that is open: none may vanish on one rank within it.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[weakref.ref[Any], ProcessGroup]] = []
        self.hooks: list[CaptureHook] = []
        self.meetings: dict[ProcessGroup, int] = {}
        self.kept: list[CaptureParticipant] | None = None
        self.captures_open = 0
        self.names: list[str] = []

    def live(self) -> list[tuple[CaptureParticipant, ProcessGroup]]:
        groups = self.groups()
        self.entries = [(ref, group) for ref, group in self.entries if ref() is not None and group in groups]
        return [(found, group) for ref, group in self.entries if (found := ref()) is not None]

    def groups(self) -> list[ProcessGroup]:
        """Every group that had a participant and was not destroyed.

        Also one whose participants are gone: a peer may still have one, and the ranks have to meet to see it.
        """
        self.meetings = {group: count for group, count in self.meetings.items() if group_store(group) is not None}
        return list(self.meetings)

    def meeting(self, group: ProcessGroup) -> Meeting:
        self.meetings[group] += 1
        return Meeting(group, f"captures/{self.meetings[group]}")


_registry = _Registry()


def register_capture_participant(participant: CaptureParticipant, group: ProcessGroup) -> None:
    """Let ``participant`` take part in every later capture, until it is garbage.

    Every rank of ``group`` calls it, as they make the state. Within a disposable scope it is checkpointed at once.

    Args:
        group: a process group of torch.distributed, of any backend.

    Raises:
        ValueError: another kind of group, or a destroyed one.
    """
    if group_store(group) is None:
        raise ValueError(f"{group!r} is not a live group of torch.distributed; pass the one that the ranks share")
    _registry.entries.append((weakref.ref(participant), group))
    _registry.meetings.setdefault(group, 0)
    if _registry.kept is not None:
        participant.checkpoint()
        _registry.kept.append(participant)


def register_capture_hook(hook: CaptureHook) -> None:
    """Enter ``hook(stream)`` in every later capture: a context of this process only, for nothing that peers share."""
    _registry.hooks.append(hook)


def other_capturing_groups() -> list[Any]:
    """The DCP, PCP and EP groups with a communicator that captures, each once; upstream enters TP, PP and DP.

    In vLLM 0.33 such communicators are made for TP only, and on ROCm for DP: the list is empty there.
    """
    from vllm.distributed import parallel_state as state

    found: list[Any] = []
    entered = [state._TP, state._PP, state._DP]
    for group in (state._DCP, state._PCP, state._EP):
        if group is None or any(group is other for other in (*entered, *found)):
            continue
        if any(getattr(group.device_communicator, name, None) is not None for name in CAPTURABLE):
            found.append(group)
    return found


@contextmanager
def captured_by_others(context: Any) -> Iterator[None]:
    """What ``graph_capture`` enters beside the TP, PP and DP groups, in the same order on every rank.

    Args:
        context: upstream's ``GraphCaptureContext``, whose stream is current.
    """
    with ExitStack() as stack:
        _registry.captures_open += 1
        stack.callback(_capture_closed)
        for hook in _registry.hooks:
            stack.enter_context(hook(context.stream))
        for group in other_capturing_groups():
            stack.enter_context(group.graph_capture(context))
        for participant, _ in _registry.live():
            stack.enter_context(participant.capture(context.stream))
        yield


def _capture_closed() -> None:
    _registry.captures_open -= 1


@contextmanager
def named(name: str, scope: AbstractContextManager[Any]) -> Iterator[Any]:
    """``scope``, an upstream ``graph_capture``, under the name of what it captures: the runner or its manager.

    Alike on all ranks; participants tell their captures apart by it.
    """
    _registry.names.append(name)
    try:
        with scope as given:
            yield given
    finally:
        _registry.names.pop()


def capture_name() -> str:
    """The name of the innermost capture that has one."""
    return _registry.names[-1] if _registry.names else "graphs"


def in_graph_capture() -> bool:
    """Whether ``graph_capture`` is open in this process: a capture, its warm-up, or what lies between two of them."""
    return _registry.captures_open > 0


def in_disposable_capture() -> bool:
    """Whether the graphs captured now are destroyed without being replayed."""
    return _registry.kept is not None


@contextmanager
def disposable_captures() -> Iterator[None]:
    """A scope around a profiling capture; at its end its graphs are gone, and participants are as before.

    Collective over the groups of all participants, and of no effect on communicators without any. A rank that raises
    inside leaves with its exception, the others with an error that quotes it; all have rolled back. Where a peer
    does not come, being stuck in a collective of the model, a rank that failed waits for
    ``PATIENCE_AFTER_FAILURE_SECONDS``, gives up without a rollback, and leaves with its exception.

    Raises:
        RuntimeError: within another such scope; ranks with different participants; a rank that failed or gave up.
    """
    if in_disposable_capture():
        raise RuntimeError("disposable captures within disposable captures; leave the outer scope first")
    _registry.kept = [participant for participant, _ in _registry.live()]
    try:
        _checkpoint(_registry.kept)
        try:
            yield
        except Exception as error:
            _roll_back_after(error)
            raise
        except BaseException as error:
            # The process ends: peers need not wait for it.
            for group in _registry.groups():
                _registry.meeting(group).give_up(f"left with {type(error).__name__}")
            raise
        _roll_back("", PATIENCE_SECONDS)
    finally:
        _registry.kept = None


def _checkpoint(participants: Sequence[CaptureParticipant]) -> None:
    groups = _registry.groups()
    meetings = [_registry.meeting(group) for group in groups]
    with giving_up(meetings, "to checkpoint"):
        for participant in participants:
            participant.checkpoint()
    agreed, errors, _ = _agree(groups, meetings, "", PATIENCE_SECONDS)
    if len(agreed) < len(groups):
        raise RuntimeError(f"disposable captures not begun: {'; '.join(errors)}")


def _roll_back_after(error: Exception) -> None:
    """Roll back; what goes wrong is logged, since ``error`` is on its way."""
    try:
        if _registry.groups():
            _drop_frames(error)
        _roll_back(f"{type(error).__name__}: {error}", PATIENCE_AFTER_FAILURE_SECONDS)
    except Exception as second:
        logger.error("After a capture that failed: %s", second)


def _roll_back(failure: str, patience_seconds: float) -> None:
    """Wait for the device and the peers, and roll back what the ranks agree on."""
    groups = _registry.groups()
    if not groups:
        return
    meetings = [_registry.meeting(group) for group in groups]
    with giving_up(meetings, "to wait for its device"):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    agreed, errors, failures = _agree(groups, meetings, failure, patience_seconds)
    for participant, group in reversed(_registry.live()):
        if group in agreed:
            try:
                participant.rollback()
            except Exception as error:
                errors.append(f"{_name(participant)}: {error}")
    if errors:
        raise RuntimeError(f"disposable captures left something behind: {'; '.join(errors)}")
    if failures and not failure:
        raise RuntimeError(f"captures discarded, since a peer left them with an exception: {'; '.join(failures)}")


def _name(participant: CaptureParticipant) -> str:
    return f"{type(participant).__module__}.{type(participant).__qualname__}"


def _agree(
    groups: Sequence[ProcessGroup], meetings: Sequence[Meeting], failure: str, patience_seconds: float
) -> tuple[list[ProcessGroup], list[str], list[str]]:
    """Compare the participants of each group; collective over all of them, and alike on the ranks of each.

    Returns:
        The groups whose ranks all came and have the same participants; what is wrong with the others; and the
        failures that ranks came with.
    """
    for group, meeting in zip(groups, meetings, strict=True):
        mine = [_name(participant) for participant, of in _registry.live() if of is group]
        meeting.arrive(json.dumps([mine, failure]))
    deadline = time.monotonic() + patience_seconds
    agreed, errors, failures = [], [], []
    for group, meeting in zip(groups, meetings, strict=True):
        try:
            said = [json.loads(text) for text in meeting.texts(deadline)]
        except RuntimeError as error:
            errors.append(str(error))
            continue
        failures += [f"rank {rank} of the group: {text}" for rank, (_, text) in enumerate(said) if text]
        if any(names != said[0][0] for names, _ in said):
            errors.append(f"ranks have different capture participants: {[names for names, _ in said]}")
        else:
            agreed.append(group)
    return agreed, errors, failures


def _drop_frames(error: BaseException | None) -> None:
    """Forget the local variables of the frames that an exception came through: they hold the graphs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
