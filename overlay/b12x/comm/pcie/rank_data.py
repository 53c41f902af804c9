# SPDX-License-Identifier: Apache-2.0
"""Bytes of a oneshot channel's rank data: pointer tables, one for each buffer that peers address.

A table holds 16 pointers of 8 bytes, whatever the world size. A channel with eager buffers
needs its fixed tables (two for the eager buffers; the CuTe backend, since 1.2.6, one more for the
signals) and one for every input that the caller registers with it.
"""

from __future__ import annotations

TABLE_BYTES = 128
GRANULE_BYTES = 4096
EAGER_TABLES = 2
DEFAULT_REGISTERED_INPUTS = 40


def rank_data_bytes(fixed_tables: int, registered_inputs: int = DEFAULT_REGISTERED_INPUTS) -> int:
    """Bytes of rank data for a channel that has eager buffers.

    Args:
        fixed_tables: tables that the backend writes itself, the two eager ones included.
        registered_inputs: inputs that the caller will register on the channel.

    Returns:
        ``128 * (fixed_tables + registered_inputs)``, rounded up to 4 KiB. Depends on its
        arguments only, so every rank gets the same value.

    Raises:
        ValueError: for fewer tables than the two eager ones, or a negative count of inputs.
    """
    if fixed_tables < EAGER_TABLES or registered_inputs < 0:
        raise ValueError(
            f"rank data for {fixed_tables} tables and {registered_inputs} registered inputs; "
            f"wanted at least {EAGER_TABLES} tables and no negative count"
        )
    needed = TABLE_BYTES * (fixed_tables + registered_inputs)
    return -(-needed // GRANULE_BYTES) * GRANULE_BYTES


def require_table_room(available_bytes: int, tables_in_use: int) -> None:
    """Refuse one more pointer table where it would not fit, before the backend is asked.

    Args:
        available_bytes: size of the channel's rank data.
        tables_in_use: fixed tables plus registered inputs so far.

    Raises:
        RuntimeError: with the counts, and the argument that makes room.
    """
    capacity = available_bytes // TABLE_BYTES
    if tables_in_use >= capacity:
        wanted = TABLE_BYTES * (tables_in_use + 1)
        raise RuntimeError(
            f"rank data of {available_bytes} bytes holds {capacity} pointer tables and all are in use; "
            f"create the channel with rank_data_bytes of at least {wanted} to register more inputs"
        )
