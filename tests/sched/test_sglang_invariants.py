"""Whatever is sent to a SGLang rank, no request and no page gets lost."""

from __future__ import annotations

from uuid import UUID

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from passtime.errors import CommandError
from passtime.sched.config import EngineConfig, FixedConfig, SglangConfig
from passtime.sched.contract import Applied, KvEvent, RankPass, Removed, Request, Stored
from passtime.sched.sglang.core import SglangCore
from passtime.sched.sglang.radix import Node
from passtime.sched.sglang.requests import RequestState
from passtime.sched.timing import FixedTiming


class SglangRankMachine(RuleBasedStateMachine):
    """Commands and passes in any order; prompts of few letters, so that they share prefixes."""

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        pages=st.integers(4, 12),
        chunk=st.sampled_from([4, 8, 64]),
        policy=st.sampled_from(["fifo", "lpm"]),
        reuse=st.booleans(),
        interval=st.sampled_from([0, 0, 2]),
        nextn=st.sampled_from([None, None, 2]),
        limit=st.sampled_from([None, 12]),
    )
    def build(
        self,
        page: int,
        pages: int,
        chunk: int,
        policy: str,
        reuse: bool,
        interval: int,
        nextn: int | None,
        limit: int | None,
    ) -> None:
        self.page = page
        self.config = EngineConfig(
            backend="sglang",
            block_size=page,
            num_gpu_blocks=pages * 4 // page,
            max_num_seqs=4,
            max_model_len=limit,
            enable_prefix_caching=reuse,
            prefill_decode_interval=interval,
            aic_nextn=nextn,
            emit_kv_events=True,
            timing_model=FixedConfig(10.0, 5.0),
            sglang=SglangConfig(
                schedule_policy=policy,  # type: ignore[arg-type]
                chunked_prefill_size=chunk,
                clip_max_new_tokens=2,
            ),
        )
        self.rank = SglangCore(self.config, FixedTiming(prefill_ms=10.0, decode_ms=5.0))
        self.now_ms = 0.0
        self.number = 0
        self.live: set[UUID] = set()
        self.sources: set[UUID] = set()
        self.destinations: set[UUID] = set()
        self.stored: set[int] = set()
        self.next_event = 0

    # --- Commands -------------------------------------------------------------------------------

    def request(self, prompt: list[int], output: int) -> Request:
        self.number += 1
        return Request(request_id=UUID(int=self.number), tokens=prompt, max_output_tokens=output)

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)

    @rule(prompt=prompts, output=st.integers(0, 8))
    def submit(self, prompt: list[int], output: int) -> None:
        request = self.request(prompt, output)
        self.rank.submit(request)
        self.live.add(request.request_id)

    @rule(prompt=prompts, output=st.integers(0, 1))
    def submit_source(self, prompt: list[int], output: int) -> None:
        request = self.request(prompt, output)
        self.rank.submit_handoff_prefill(request.request_id, request)
        self.live.add(request.request_id)
        self.sources.add(request.request_id)

    @rule(prompt=prompts, output=st.integers(0, 8), in_flight=st.booleans())
    def reserve(self, prompt: list[int], output: int, in_flight: bool) -> None:
        request = self.request(prompt, output)
        try:
            self.rank.reserve_destination(request.request_id, request, pass_in_flight=in_flight)
        except CommandError:
            assert not self.rank.knows(request.request_id)
        else:
            self.destinations.add(request.request_id)
            self.live.add(request.request_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), in_flight=st.booleans())
    def cancel(self, data: st.DataObject, in_flight: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        outcome = self.rank.cancel(request_id, pass_in_flight=in_flight)
        self.end(outcome.retired)

    @precondition(lambda self: self.sources)
    @rule(data=st.data(), command=st.sampled_from(["release_source", "cancel_source"]))
    def end_source(self, data: st.DataObject, command: str) -> None:
        handoff_id = data.draw(st.sampled_from(sorted(self.sources)))
        self.end(getattr(self.rank, command)(handoff_id).retired)
        self.sources.discard(handoff_id)

    @precondition(lambda self: self.destinations)
    @rule(data=st.data(), command=st.sampled_from(["activate_destination", "cancel_destination"]))
    def move_destination(self, data: st.DataObject, command: str) -> None:
        handoff_id = data.draw(st.sampled_from(sorted(self.destinations)))
        outcome = getattr(self.rank, command)(handoff_id)
        self.end(outcome.retired)
        if isinstance(outcome.result, Applied):
            self.destinations.discard(handoff_id)

    # --- Passes ---------------------------------------------------------------------------------

    @rule(passes=st.integers(1, 6))
    def run_passes(self, passes: int) -> None:
        for _ in range(passes):
            if not self.rank.has_requests():
                return
            rank_pass = self.rank.execute_pass(self.now_ms)
            if rank_pass.stuck is not None:
                assert len(self.rank.running) == 1
                assert rank_pass.end_ms == self.now_ms
            self.complete(rank_pass)

    def complete(self, rank_pass: RankPass) -> None:
        effects = rank_pass.pending.effects
        self.apply_events(effects.kv_events)
        worked = any(output.token_id is not None for output in effects.outputs)
        prefilled = effects.forward_pass.sum_prefill_tokens > 0
        self.rank.settle_group(group_prefilled=prefilled, group_worked=worked or prefilled)
        self.rank.retry_destinations()
        assert rank_pass.end_ms >= self.now_ms
        self.now_ms = rank_pass.end_ms
        held = {state.request_id for state in self.rank.sources.held.values()}
        ended = [output.request_id for output in effects.outputs if output.completed]
        assert len(ended) == len(set(ended))
        self.end([request_id for request_id in ended if request_id not in held])

    def end(self, request_ids: list[UUID]) -> None:
        """These ended now, and none of them before."""
        assert self.live.issuperset(request_ids)
        self.live.difference_update(request_ids)

    # --- Invariants -----------------------------------------------------------------------------

    def owners(self) -> list[RequestState]:
        rank = self.rank
        return [
            *rank.requests.values(),
            *rank.sources.held.values(),
            *rank.destinations.unstarted(),
        ]

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        rank = self.rank
        queued = [*rank.waiting, *rank.running, *rank.prebuilt]
        assert sorted(r.request_id for r in queued) == sorted(rank.requests)
        known = [r.request_id for r in self.owners()]
        assert len(known) == len(set(known))
        assert set(known) == self.live
        assert len(rank.running) <= 4

    @invariant()
    def every_page_has_one_owner(self) -> None:
        cache = self.rank.cache
        own = [
            page
            for owner in self.owners()
            for page in owner.lease.pages[owner.lease.cached // self.page :]
        ]
        tree = [page for node in self.nodes() for page in node.pages]
        everywhere = own + tree + cache._free
        assert sorted(everywhere) == list(range(cache.total_pages))

    @invariant()
    def leases_cover_what_they_say(self) -> None:
        locks: dict[int, int] = {}
        for owner in self.owners():
            lease = owner.lease
            if lease.node is None:
                assert (lease.pages, lease.materialized, lease.cached) == ([], 0, 0)
                continue
            tokens = max(lease.materialized, 0 if lease.materialized else owner.prompt_tokens)
            assert len(lease.pages) == -(-tokens // self.page)
            assert lease.pages[: lease.cached // self.page] == self.path_pages(lease.node)
            node = lease.node
            while node.parent is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        assert all(node.locks == locks.get(id(node), 0) for node in self.nodes())
        assert all(r.lease.materialized == r.length for r in self.rank.running)

    @invariant()
    def announced_hashes_are_those_still_held(self) -> None:
        """KV events, applied in order, leave what the recorder believes to be there."""
        self.apply_events(self.rank.drain_kv_events())
        recorder = self.rank.cache._recorder
        assert recorder is not None
        assert self.stored == set(recorder._announced.values())

    def apply_events(self, events: list[KvEvent]) -> None:
        for event in events:
            assert event.event_id == self.next_event
            self.next_event += 1
            match event.data:
                case Stored(blocks=blocks):
                    self.stored.update(block.block_hash for block in blocks)
                case Removed(block_hashes=block_hashes):
                    assert self.stored.issuperset(block_hashes)
                    self.stored.difference_update(block_hashes)

    def nodes(self) -> list[Node]:
        found: list[Node] = []
        open_nodes = list(self.rank.cache._tree.root.children.values())
        while open_nodes:
            node = open_nodes.pop()
            found.append(node)
            open_nodes += node.children.values()
        return found

    def path_pages(self, node: Node) -> list[int]:
        pages: list[int] = []
        while node.parent is not None:
            pages = node.pages + pages
            node = node.parent
        return pages


SglangRankMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_sglang_rank = SglangRankMachine.TestCase
