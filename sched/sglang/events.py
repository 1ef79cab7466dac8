"""KV events of the radix cache: what became findable, what is gone (S-60)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from passtime.sched.contract import KvEvent, Removed, Stored, StoredBlock
from passtime.sched.tokens import local_block_hash, sequence_hash


class KvEventRecorder:
    """Announces pages once per content: duplicates are counted, and removed with the last copy."""

    def __init__(self, *, page_tokens: int, dp_rank: int, with_token_ids: bool) -> None:
        """A recorder that has announced nothing yet; event ids count from 0."""
        self._page_tokens = page_tokens
        self._dp_rank = dp_rank
        self._with_token_ids = with_token_ids
        self._announced: dict[int, int] = {}  # physical page -> block hash
        self._copies: Counter[int] = Counter()
        self._next_id = 0
        self._events: list[KvEvent] = []

    def stored(self, tokens: Sequence[int], pages: Sequence[int], first: int, end: int) -> None:
        """Announce pages ``first`` … ``end - 1`` of a request that are not announced yet.

        The event starts with the first page that is the only copy of its content.
        """
        blocks: list[StoredBlock] = []
        parent_of_event: int | None = None
        for index in range(first, end):
            page = pages[index]
            if page in self._announced:
                continue
            parent = self._announced.get(pages[index - 1]) if index else None
            content = tokens[index * self._page_tokens : (index + 1) * self._page_tokens]
            local = local_block_hash(content)
            block_hash = sequence_hash(parent, local)
            self._announced[page] = block_hash
            self._copies[block_hash] += 1
            if not blocks and self._copies[block_hash] > 1:
                continue
            if not blocks:
                parent_of_event = parent
            token_ids = tuple(content) if self._with_token_ids else None
            blocks.append(
                StoredBlock(block_hash=block_hash, tokens_hash=local, token_ids=token_ids)
            )
        if blocks:
            self._emit(Stored(parent_hash=parent_of_event, blocks=tuple(blocks)))

    def removed(self, pages: Sequence[int]) -> None:
        """Pages returned to the pool: hashes without another copy form one event."""
        gone: list[int] = []
        for page in pages:
            block_hash = self._announced.pop(page, None)
            if block_hash is None:
                continue
            self._copies[block_hash] -= 1
            if self._copies[block_hash] == 0:
                del self._copies[block_hash]
                gone.append(block_hash)
        if gone:
            self._emit(Removed(block_hashes=tuple(gone)))

    def drain(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _emit(self, data: Stored | Removed) -> None:
        self._events.append(KvEvent(event_id=self._next_id, dp_rank=self._dp_rank, data=data))
        self._next_id += 1
