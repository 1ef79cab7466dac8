"""What must hold inside a rank between any two commands, whatever was sent before.

Everything is derived anew from the requests that are there, and compared with what the rank keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from passtime.sched.contract import RequestId
from passtime.sched.sglang.core import SglangCore
from passtime.sched.sglang.radix import Node, RadixTree
from passtime.sched.sglang.requests import RequestState as SglangRequest
from passtime.sched.tokens import local_block_hash, sequence_hash
from passtime.sched.vllm.blocks import BlockCopy
from passtime.sched.vllm.core import VllmCore
from passtime.sched.vllm.requests import RequestState, RequestStatus


class Place(Enum):
    """Where a request stands on a rank; it is in exactly one."""

    SCHEDULER = auto()
    HELD = auto()
    PENDING = auto()
    RESERVED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the audit found: where everybody is, and what the rank has to say of its pool.

    ``held_blocks`` counts what somebody owns or was promised, ``shown_blocks`` what metrics call
    active, ``cached`` the hashes of which KV events must have told.
    """

    places: dict[RequestId, Place]
    held_blocks: int
    shown_blocks: int
    cached: frozenset[int]
    running: int
    waiting: int


def audit(core: VllmCore | SglangCore) -> Audit:
    """Check every invariant of a core."""
    return _audit_vllm(core) if isinstance(core, VllmCore) else _audit_sglang(core)


def chain_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """Sequence hashes of the whole blocks of ``tokens``."""
    hashes: list[int] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        local = local_block_hash(tokens[start : start + block_tokens])
        hashes.append(sequence_hash(hashes[-1] if hashes else None, local))
    return hashes


def _places(
    *groups: tuple[Place, Iterable[RequestState] | Iterable[SglangRequest]],
) -> dict[RequestId, Place]:
    found = [(request.request_id, place) for place, requests in groups for request in requests]
    assert len(found) == len({request_id for request_id, _ in found}), "one id in two places"
    return dict(found)


# --- vLLM and TensorRT-LLM ----------------------------------------------------------------------


def _audit_vllm(core: VllmCore) -> Audit:
    destinations = core.destinations
    places = _places(
        (Place.SCHEDULER, [*core.running, *core.waiting]),
        (Place.HELD, core.sources.held.values()),
        (Place.PENDING, [entry.request for entry in destinations.pending]),
        (Place.RESERVED, [entry.request for entry in destinations.reserved.values()]),
    )
    _queues_are_consistent(core)
    owners = [*core.running, *core.waiting, *core.sources.held.values()]
    for request in owners:
        _table_is_consistent(core, request)
    active = _pool_is_consistent(core, owners)
    _lookups_find_what_is_cached(core, active, owners)
    held = len(active) + core.pool.reserved
    return Audit(
        places=places,
        held_blocks=held,
        shown_blocks=held,
        cached=frozenset(core.pool.index),
        running=len(core.running),
        waiting=len(core.waiting) + len(destinations.pending) + len(destinations.reserved),
    )


def _queues_are_consistent(core: VllmCore) -> None:
    scheduled = [*core.running, *core.waiting]
    assert {r.request_id: r for r in scheduled} == core.requests
    assert len(core.running) <= core.config.seqs_limit
    assert all(r.status is RequestStatus.RUNNING for r in core.running)
    assert all(r.status is not RequestStatus.RUNNING for r in core.waiting)
    materialized = [r for r in core.waiting if r.activated and r.status is RequestStatus.WAITING]
    assert list(core.materialized) == materialized
    assert set(core.sources.pending.values()) <= set(core.requests)
    assert all(core.requests[r.request_id] is r for r in core.destinations.active.values())


def _table_is_consistent(core: VllmCore, request: RequestState) -> None:
    """V-1, V-2, V-54: what is allocated is owned, what is computed is findable."""
    block_tokens = core.config.block_tokens
    assert request.computed <= request.allocated <= request.length
    assert len(request.blocks) == -(-request.length // block_tokens)
    owned = -(-request.allocated // block_tokens)
    assert [block.copy is not None for block in request.blocks] == [
        index < owned for index in range(len(request.blocks))
    ]
    if not core.config.enable_prefix_caching:
        assert all(block.identity is None for block in request.blocks)
        return
    hashes: list[int | None] = [*chain_hashes(request.tokens, block_tokens), None]
    known = max(request.prompt_tokens, request.computed) // block_tokens
    for index, block in enumerate(request.blocks):
        assert block.identity == hashes[index] or (block.identity is None and index >= known)
        if block.copy is not None:
            assert block.copy.identity in (None, block.identity)
            assert block.copy.identity is not None or index >= request.computed // block_tokens


def _pool_is_consistent(core: VllmCore, owners: list[RequestState]) -> set[BlockCopy]:
    """V-52: referenced + LRU + reserved + free = capacity; returns the referenced and pinned."""
    pool = core.pool
    references = Counter(block.copy for r in owners for block in r.blocks if block.copy is not None)
    reservations = list(core.destinations.reserved.values())
    pins = Counter(copy for reservation in reservations for copy in reservation.pinned)
    active = {*references, *pins}
    for copy in active:
        assert (copy.references, copy.pins) == (references[copy], pins[copy])
        assert copy.identity is not None or (copy.references, copy.pins) == (1, 0)
    indexed = [copy for copies in pool.index.values() for copy in copies]
    assert len(indexed) == len(set(indexed))
    assert all(pool.index.values()), "an index entry without a copy"
    assert all(copy.identity == key for key, copies in pool.index.items() for copy in copies)
    assert {copy for copy in active if copy.identity is not None} <= set(indexed)
    unreferenced = [copy for copy in indexed if copy not in active]
    assert set(pool._lru) == set(unreferenced)
    assert pool.reserved == sum(reservation.reserved_blocks for reservation in reservations)
    assert pool.free >= 0
    assert pool.unreferenced == len(unreferenced)
    assert len(active) + len(unreferenced) + pool.reserved + pool.free == pool.capacity
    assert pool.active == len(active) + pool.reserved
    assert not pool.evicted, "evictions that no event will tell of"
    if not core.config.enable_prefix_caching:
        assert not indexed
    return active


def _lookups_find_what_is_cached(
    core: VllmCore, active: set[BlockCopy], owners: list[RequestState]
) -> None:
    """V-50: exactly the leading blocks of which the pool has a copy, and its first copy."""
    destinations = core.destinations
    awaited = [entry.request for entry in destinations.pending]
    awaited += [entry.request for entry in destinations.reserved.values()]
    for request in [*owners, *awaited]:
        expected: list[BlockCopy] = []
        for block, identity in zip(
            request.blocks, chain_hashes(request.tokens, request.block_tokens), strict=False
        ):
            if block.identity is None or identity not in core.pool.index:
                break
            expected.append(core.pool.index[identity][0])
        active_hits = sum(copy in active for copy in expected)
        assert core.lookup(request) == (expected, active_hits)


# --- SGLang -------------------------------------------------------------------------------------


def _audit_sglang(core: SglangCore) -> Audit:
    destinations = core.destinations
    queued = [*core.waiting, *core.prebuilt, *core.running]
    places = _places(
        (Place.SCHEDULER, queued),
        (Place.HELD, core.sources.held.values()),
        (Place.PENDING, destinations.pending.values()),
        (Place.RESERVED, destinations.reserved.values()),
    )
    assert {r.request_id: r for r in queued} == core.requests
    assert len(core.running) <= core.config.seqs_limit
    assert all(core.requests[r.request_id] is r for r in core.sources.pending.values())
    assert all(core.requests[r.request_id] is r for r in destinations.active.values())
    owners = [*queued, *core.sources.held.values(), *destinations.unstarted()]
    _pages_have_one_owner(core, owners)
    recorder = core.cache._recorder
    return Audit(
        places=places,
        held_blocks=core.cache.occupied_pages
        - core.cache._tree.evictable_tokens // core.config.block_tokens,
        shown_blocks=core.cache.occupied_pages,
        cached=frozenset(recorder._announced.values()) if recorder else frozenset(),
        running=len(core.running),
        waiting=len(core.waiting) + len(core.prebuilt) + len(destinations.unstarted()),
    )


def _pages_have_one_owner(core: SglangCore, owners: list[SglangRequest]) -> None:
    """A page is a lease's own, the tree's or free; locks are those of the leases (S-10, S-12)."""
    cache, page_tokens = core.cache, core.config.block_tokens
    own = [page for r in owners for page in r.lease.pages[r.lease.cached // page_tokens :]]
    nodes = _nodes(cache._tree)
    tree = [page for node in nodes for page in node.pages]
    assert sorted(own + tree + cache._free) == list(range(cache.total_pages))
    locks = Counter(node for r in owners for node in _path(r.lease.node))
    assert all(node.locks == locks[node] for node in nodes)
    unlocked = sum(len(node.key) for node in nodes if not node.locks)
    assert cache._tree.evictable_tokens == unlocked


def _nodes(tree: RadixTree) -> list[Node]:
    found: list[Node] = []
    open_nodes = list(tree.root.children.values())
    while open_nodes:
        node = open_nodes.pop()
        found.append(node)
        open_nodes += node.children.values()
    return found


def _path(node: Node | None) -> list[Node]:
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path
