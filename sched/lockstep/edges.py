"""What the edges of a lock-step radix tree hold: pages of prompts and of outputs, not spelled out.

An edge says where its pages come from: from a prompt, that is from its trace blocks, and then,
perhaps, from the output of one request, which nobody else can have. Two prompts have a page in
common if all trace blocks up to its last token are equal, whatever the sizes of both (R-31).
"""

from __future__ import annotations

from collections.abc import Sequence

from passtime.sched.lockstep.steps import Key, SteppedSequence


class Node:
    """Pages ``start`` … ``end`` of a path: up to ``prompt_end`` from the prompt ``block_ids``,
    then produced by request ``owner``.

    ``locks`` counts the leases at or below it; ``holders`` are the sequences whose published
    prefix ends here.
    """

    __slots__ = (
        "age",
        "block_ids",
        "children",
        "end",
        "holders",
        "key",
        "locks",
        "owner",
        "parent",
        "prompt_end",
        "start",
    )

    def __init__(
        self,
        parent: Node | None,
        key: Key,
        block_ids: Sequence[int],
        owner: int,
        start: int,
        prompt_end: int,
        end: int,
        age: int,
    ) -> None:
        """An unlocked edge."""
        self.parent = parent
        self.key = key
        self.block_ids = block_ids
        self.owner = owner
        self.start = start
        self.prompt_end = prompt_end
        self.end = end
        self.locks = 0
        self.age = age
        self.children: dict[Key, Node] = {}
        self.holders: list[SteppedSequence] = []


class Content:
    """Compares sequences with edges, page by page."""

    def __init__(
        self,
        page_tokens: int,
        prompts: Sequence[Sequence[int]] | None,
        trace_block_tokens: int,
    ) -> None:
        """``prompts`` are the trace blocks of each row; None: no two have anything in common."""
        self._page_tokens = page_tokens
        self._prompts = prompts
        self._block_tokens = trace_block_tokens
        self._pages_per_block = 0  # if it is a whole number, and prompts are told apart
        if prompts is not None and trace_block_tokens % page_tokens == 0:
            self._pages_per_block = trace_block_tokens // page_tokens

    def enter(self, sequence: SteppedSequence) -> None:
        """A request arrived: remember what its prompt consists of."""
        row = sequence.row
        sequence.block_ids = (row,) if self._prompts is None else self._prompts[row]
        sequence.prompt_pages = sequence.prompt_tokens // self._page_tokens
        sequence.first_key = self.key(sequence, 0)

    def key(self, sequence: SteppedSequence, page: int) -> Key:
        """What a child is found by: the trace blocks of its first page, or whose output it is."""
        if page >= sequence.prompt_pages:
            return (sequence.row,)  # a page of output; of several blocks a page has two at least
        if self._pages_per_block:
            return sequence.block_ids[page // self._pages_per_block]
        return self.block_key(sequence.block_ids, page)

    def block_key(self, block_ids: Sequence[int], page: int) -> Key:
        """The trace blocks of a page that holds nothing but prompt."""
        if self._prompts is None:
            return block_ids[0]
        first = page * self._page_tokens // self._block_tokens
        last = ((page + 1) * self._page_tokens - 1) // self._block_tokens
        return block_ids[first] if first == last else tuple(block_ids[first : last + 1])

    def agree(self, node: Node, sequence: SteppedSequence, end: int) -> int:
        """The page up to which ``node`` and a sequence agree, at most ``end``.

        The sequence was led there by its key: they agree on the first page.
        """
        page, limit = node.start, sequence.prompt_pages
        if node.prompt_end < limit:
            limit = node.prompt_end
        if end < limit:
            limit = end
        if page < limit:
            size, block = self._page_tokens, self._block_tokens
            ours, theirs = node.block_ids, sequence.block_ids
            same, beyond = page * size // block + 1, -(-limit * size // block)
            if same >= beyond or ours is theirs or ours[same:beyond] == theirs[same:beyond]:
                page = limit
            else:
                page = _equal_blocks(ours, theirs, same, beyond) * block // size
        if page == node.prompt_end and page >= sequence.prompt_pages and node.owner == sequence.row:
            return min(node.end, end)
        return page

    def head_key(self, sequence: SteppedSequence, tokens: int) -> object:
        """Equal for sequences whose first ``tokens`` tokens are equal."""
        if self._prompts is None or tokens > sequence.prompt_tokens:
            return sequence.row
        return tuple(sequence.block_ids[: -(-tokens // self._block_tokens)])


def _equal_blocks(ours: Sequence[int], theirs: Sequence[int], same: int, different: int) -> int:
    """How many leading blocks are equal: ``same`` or more, and fewer than ``different``."""
    while different - same > 1:
        middle = (same + different) // 2
        if ours[same:middle] == theirs[same:middle]:
            same = middle
        else:
            different = middle
    return same
