"""The radix tree against a plain set of prefixes, and its order of eviction."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from passtime.sched.sglang.radix import Node, RadixTree

PAGE = 2


def tree_with(*sequences: str) -> RadixTree:
    """A tree of pages of one letter each, with the sequences inserted in that order."""
    tree = RadixTree(page_tokens=1)
    for index, letters in enumerate(sequences):
        pages = [100 * index + position for position in range(len(letters))]
        tree.insert(tree.root, tokens(letters), pages)
    return tree


def tokens(letters: str) -> list[int]:
    return [ord(letter) for letter in letters]


def test_a_lookup_counts_whole_pages_only() -> None:
    tree = RadixTree(page_tokens=4)
    tree.insert(tree.root, list(range(8)), [0, 1])
    assert tree.peek(list(range(8)), 8) == 8
    assert tree.peek([*range(7), 99], 8) == 4
    assert tree.peek(list(range(8)), 4) == 4
    assert tree.peek([99, *range(7)], 8) == 0


def test_a_prompt_that_leaves_an_edge_splits_it() -> None:
    tree = tree_with("abcd", "abxy")
    length, node = tree.match_and_lock(tokens("abcd"), 4)
    assert length == 4
    assert node.key == tokens("cd")
    assert node.parent is not None
    assert node.parent.key == tokens("ab")
    assert tree.path_pages(node, 4) == [0, 1, 2, 3]
    assert tree.path_pages(node, 3) == [1, 2, 3]


def test_pages_of_known_content_are_not_stored_twice() -> None:
    tree = tree_with("abcd")
    node = tree.insert(tree.root, tokens("abce"), [10, 11, 12, 13])
    assert tree.path_pages(node, 4) == [0, 1, 2, 13]
    assert tree.evictable_tokens == 5


def test_a_leaf_that_its_only_holder_extends_grows_in_place() -> None:
    tree = tree_with("ab")
    _, node = tree.match_and_lock(tokens("ab"), 2)
    assert tree.insert(node, tokens("cd"), [7, 8]) is node
    assert (tree.evictable_tokens, tree.protected_tokens) == (0, 4)


def test_a_leaf_that_others_hold_gets_a_child_instead() -> None:
    tree = tree_with("ab")
    _, node = tree.match_and_lock(tokens("ab"), 2)
    tree.match_and_lock(tokens("ab"), 2)
    child = tree.insert(node, tokens("cd"), [7, 8])
    assert child.parent is node
    assert (tree.evictable_tokens, tree.protected_tokens) == (2, 2)


def test_the_least_recently_used_leaf_is_evicted_from_its_tail() -> None:
    tree = tree_with("abcd", "wxyz")
    assert tree.evict(1) == [3]
    tree.match_and_lock(tokens("abc"), 3)
    assert tree.evict(1) == [103]
    assert tree.evict(10) == [100, 101, 102]
    assert tree.peek(tokens("abc"), 3) == 3


def test_a_touched_leaf_outlives_an_untouched_one() -> None:
    tree = tree_with("ab", "wx")
    _, node = tree.match_and_lock(tokens("ab"), 2)
    tree.unlock(node)
    assert tree.evict(2) == [100, 101]


def test_a_parent_is_evicted_only_after_its_children() -> None:
    tree = tree_with("ab")
    tree.insert(tree.root, tokens("abcd"), [0, 1, 12, 13])
    tree.insert(tree.root, tokens("abxy"), [0, 1, 22, 23])
    assert tree.evict(2) == [12, 13]
    assert tree.evict(4) == [22, 23, 0, 1]
    assert tree.root.children == {}


def test_a_split_keeps_the_age_of_both_halves() -> None:
    """Matching into an edge does not make it younger: only whole edges are touched."""
    tree = tree_with("abcd", "wxyz")
    _, node = tree.match_and_lock(tokens("ab"), 2)
    tree.unlock(node)
    assert tree.evict(2) == [2, 3]
    assert tree.evict(2) == [0, 1]


class TreeAgainstSet(RuleBasedStateMachine):
    """Leases come and go as a core would have it; every cached prefix is also kept in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(page_tokens=PAGE)
        self.next_page = 0
        self.held: list[tuple[Node, list[int]]] = []

    def fresh_pages(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    @rule(letters=st.lists(st.integers(0, 2), max_size=8))
    def acquire(self, letters: list[int]) -> None:
        sequence = letters[: len(letters) // PAGE * PAGE]
        expected = self.longest_cached(sequence)
        assert self.tree.peek(sequence, len(sequence)) == expected
        length, node = self.tree.match_and_lock(sequence, len(sequence))
        assert length == expected
        self.held.append((node, sequence[:length]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=PAGE, max_size=6))
    def publish(self, data: st.DataObject, more: list[int]) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        node, sequence = self.held[index]
        suffix = more[: len(more) // PAGE * PAGE]
        end = self.tree.insert(node, suffix, self.fresh_pages(len(suffix) // PAGE))
        if end is not node:
            self.tree.lock(end)
            self.tree.unlock(node)
        self.held[index] = (end, sequence + suffix)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.tree.unlock(self.held.pop(index)[0])

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        before = self.tree.evictable_tokens
        freed = self.tree.evict(pages * PAGE)
        assert len(freed) * PAGE == min(before, pages * PAGE)
        assert self.tree.evictable_tokens == before - len(freed) * PAGE

    @invariant()
    def held_prefixes_stay_where_they_were(self) -> None:
        for node, sequence in self.held:
            assert self.tree.peek(sequence, len(sequence)) == len(sequence)
            assert sequence == self.path_tokens(node)
            assert len(self.tree.path_pages(node, len(sequence))) == len(sequence) // PAGE

    @invariant()
    def totals_and_locks_follow_from_the_nodes(self) -> None:
        locks: dict[int, int] = {}
        for node, _ in self.held:
            while node.parent is not None:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        nodes = list(self.nodes(self.tree.root))
        assert all(node.locks == locks.get(id(node), 0) for node in nodes)
        assert all(len(node.key) == PAGE * len(node.pages) > 0 for node in nodes)
        assert self.tree.evictable_tokens == sum(len(n.key) for n in nodes if not n.locks)
        assert self.tree.protected_tokens == sum(len(n.key) for n in nodes if n.locks)
        pages = [page for node in nodes for page in node.pages]
        assert len(pages) == len(set(pages))

    def nodes(self, node: Node) -> list[Node]:
        below = [n for child in node.children.values() for n in (child, *self.nodes(child))]
        assert all(child.parent is node for child in node.children.values())
        return below

    def path_tokens(self, node: Node) -> list[int]:
        path: list[int] = []
        while node.parent is not None:
            path = node.key + path
            node = node.parent
        return path

    def longest_cached(self, sequence: list[int]) -> int:
        """The longest cached prefix by listing every root-to-node path."""
        cached: set[tuple[int, ...]] = {()}
        for node in self.nodes(self.tree.root):
            path = self.path_tokens(node)
            cached |= {tuple(path[:end]) for end in range(0, len(path) + 1, PAGE)}
        return max(
            end for end in range(0, len(sequence) + 1, PAGE) if tuple(sequence[:end]) in cached
        )


TreeAgainstSet.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_tree_against_set = TreeAgainstSet.TestCase
