"""What two ranks agree on before a byte of metadata is exchanged: how their blocks are cut into slots. Pure.

A *slot* is the greatest run of tokens that the blocks of both sides are multiples of. Positions of a transfer are
counted in slots from its first token, whatever the size of either side's blocks; where both have blocks of one size, a
slot is a block. A *cell* is one slot of one layer: what has to be written is a set of cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpush import wire
from kvpush.blocks import MAX_SLOTS_PER_BLOCK, BlockIds, check_remote_ids, slots_between
from kvpush.errors import Incompatible

MAX_BLOCKS = 2**31 - 1  # until the handshake has told the real number, which is checked before the WRITE

Slots = npt.NDArray[np.int64]  # shape (slots,): block_id * slots_per_block + place in the block


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """How one group's blocks are cut, on either side."""

    name: str
    slot_size_tokens: int
    prefill_slots_per_block: int
    decode_slots_per_block: int

    @property
    def decode_size_tokens(self) -> int:
        """Tokens in a block of decode."""
        return self.slot_size_tokens * self.decode_slots_per_block


def group_terms(name: str, prefill_block_size_tokens: int, decode_block_size_tokens: int) -> GroupTerms:
    """Both sides come to the same terms, each from its own block size and the other's.

    Raises Incompatible naming both sizes when they have so little in common that slots would be too many.
    """
    slot_size_tokens = math.gcd(prefill_block_size_tokens, decode_block_size_tokens)
    if max(prefill_block_size_tokens, decode_block_size_tokens) // slot_size_tokens > MAX_SLOTS_PER_BLOCK:
        raise Incompatible(
            f"group {name!r}: blocks of {prefill_block_size_tokens} tokens at prefill and of "
            f"{decode_block_size_tokens} at decode have only {slot_size_tokens} in common, which makes more than "
            f"{MAX_SLOTS_PER_BLOCK} slots a block"
        )
    return GroupTerms(
        name,
        slot_size_tokens,
        prefill_block_size_tokens // slot_size_tokens,
        decode_block_size_tokens // slot_size_tokens,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What decode wants of one group: slots ``first_slot`` .. of the transfer go into those of ``block_ids``, in order.

    The slots of a long list are not laid out before they are needed.
    """

    first_slot: int
    num_slots: int
    block_ids: BlockIds
    slots_per_block: int
    highest_block: int  # -1 when there is none

    def between(self, first_slot: int, end_slot: int) -> Slots:
        """Where these slots of the transfer go; they are among those that are wanted."""
        return slots_between(
            self.block_ids, self.slots_per_block, first_slot - self.first_slot, end_slot - self.first_slot
        )


def wanted_slots(want: wire.Want, terms: GroupTerms) -> Wanted:
    """Unpack a want. Raises ``Failure(bad_blocks)`` for impossible ids and RemoteProtocolError for a cut-off list."""
    block_ids = wire.unpack_block_ids(want.block_ids).astype(np.int64)
    check_remote_ids(block_ids, MAX_BLOCKS)
    first_slot, num_slots = slot_range(want.first_block, len(block_ids), want.num_tokens, terms)
    return Wanted(
        first_slot, num_slots, block_ids, terms.decode_slots_per_block, highest_block=int(block_ids.max(initial=-1))
    )


def slot_range(first_block: int, num_blocks: int, num_tokens: int, terms: GroupTerms) -> tuple[int, int]:
    """First slot and number of slots of these blocks of decode, up to the one that holds token ``num_tokens`` - 1."""
    first_slot = first_block * terms.decode_slots_per_block
    num_slots = num_blocks * terms.decode_slots_per_block
    if num_tokens:
        end_slot = -(-num_tokens // terms.slot_size_tokens)
        num_slots = min(num_slots, max(0, end_slot - first_slot))
    return first_slot, num_slots


def all_terms(own: Mapping[str, int], decode: Mapping[str, int]) -> dict[str, GroupTerms]:
    """For prefill: the terms of every group that both sides have, by name. Block sizes are in tokens.

    Raises Incompatible as :func:`group_terms` does.
    """
    return {name: group_terms(name, size, decode[name]) for name, size in own.items() if name in decode}
