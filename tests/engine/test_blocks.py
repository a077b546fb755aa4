"""The block pool: who is free, in which order, what is remembered, and that nothing is ever both free and held."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvconn.engine.blocks import BlockPool, block_hashes


class TestOrder:
    def test_a_fresh_pool_gives_blocks_in_order(self) -> None:
        pool = BlockPool(4)
        assert pool.allocate(2) == [0, 1]
        assert pool.allocate(2) == [2, 3]

    def test_a_requests_blocks_return_to_the_tail_in_reverse(self) -> None:
        pool = BlockPool(5)
        first, second = pool.allocate(3), pool.allocate(2)
        assert first is not None and second is not None
        pool.give_back(first)
        pool.give_back(second)
        assert pool.allocate(5) == [2, 1, 0, 4, 3]

    def test_never_used_blocks_go_before_returned_ones(self) -> None:
        pool = BlockPool(4)
        first = pool.allocate(2)
        assert first is not None
        pool.give_back(first)
        assert pool.allocate(4) == [2, 3, 1, 0]

    def test_of_one_prompt_the_end_is_forgotten_first(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(3)
        assert blocks is not None
        hashes = block_hashes(range(12), 4)
        for block, content in zip(blocks, hashes, strict=True):
            pool.cache(block, content)
        pool.give_back(blocks)
        pool.allocate(1)
        assert pool.find(hashes) == blocks[:2]
        pool.allocate(1)
        assert pool.find(hashes) == blocks[:1]


class TestReferences:
    def test_a_shared_block_is_free_when_its_last_holder_lets_go(self) -> None:
        pool = BlockPool(2)
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.take(blocks)
        pool.give_back(blocks)
        assert (pool.num_used, pool.num_free) == (1, 1)
        pool.give_back(blocks)
        assert (pool.num_used, pool.num_free) == (0, 2)

    def test_giving_back_a_free_block_is_refused(self) -> None:
        pool = BlockPool(2)
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.give_back(blocks)
        with pytest.raises(AssertionError, match="block 0 is free already"):
            pool.give_back(blocks)

    def test_taking_a_free_block_removes_it_from_the_queue(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.cache(blocks[0], b"a")
        pool.give_back(blocks)
        assert pool.free_among(blocks) == 1
        pool.take(pool.find([b"a"]))
        assert pool.free_among(blocks) == 0
        assert pool.allocate(3) is None
        assert pool.allocate(2) == [1, 2]

    def test_too_many_changes_nothing(self) -> None:
        pool = BlockPool(3)
        blocks = pool.allocate(2)
        assert blocks is not None
        pool.cache(blocks[1], b"a")
        pool.give_back(blocks)
        before = repr(pool)
        assert pool.allocate(4) is None
        assert repr(pool) == before and pool.find([b"a"]) == [1]
        assert pool.allocate(3) == [2, 1, 0]

    def test_nothing_is_allocated_from_a_full_pool(self) -> None:
        pool = BlockPool(1)
        assert pool.allocate(1) == [0]
        assert pool.allocate(0) == []


class TestPrefixCache:
    def test_a_free_block_is_found_until_it_is_given_out_again(self) -> None:
        pool = BlockPool(2)
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.cache(blocks[0], b"a")
        pool.give_back(blocks)
        assert pool.find([b"a"]) == [0]
        assert pool.allocate(1) == [1]
        assert pool.find([b"a"]) == [0]
        assert pool.allocate(1) == [0]
        assert pool.find([b"a"]) == []

    def test_a_run_ends_at_the_first_unknown_hash(self) -> None:
        pool = BlockPool(3)
        pool.allocate(3)
        for block, content in enumerate([b"a", b"b", b"c"]):
            pool.cache(block, content)
        assert pool.find([b"a", b"x", b"c"]) == [0]
        assert pool.find([b"x", b"a"]) == []

    def test_the_first_block_of_a_content_stays_the_one_found(self) -> None:
        pool = BlockPool(3)
        pool.allocate(2)
        pool.cache(0, b"a")
        pool.cache(1, b"a")
        assert pool.find([b"a"]) == [0]
        pool.give_back([1])
        assert pool.allocate(2) == [2, 1]
        assert pool.find([b"a"]) == [0], "forgetting the copy must not forget the original"

    def test_reset_forgets_content_and_keeps_references(self) -> None:
        pool = BlockPool(2)
        pool.allocate(1)
        pool.cache(0, b"a")
        pool.reset()
        assert pool.find([b"a"]) == [] and pool.num_used == 1
        pool.cache(0, b"b")
        assert pool.find([b"b"]) == [0]

    def test_equal_hashes_mean_equal_prefixes(self) -> None:
        assert block_hashes([1, 2, 3, 4], 2)[1] != block_hashes([9, 2, 3, 4], 2)[1]
        assert block_hashes([1, 2, 3, 4, 5], 2) == block_hashes([1, 2, 3, 4], 2)

    def test_known_hashes_are_continued(self) -> None:
        tokens = list(range(23))
        whole = block_hashes(tokens, 4)
        assert block_hashes(tokens, 4, whole[:2]) == whole
        assert block_hashes(tokens, 4, whole) == whole


def test_repr_is_one_readable_line() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.cache(0, b"a")
    assert repr(pool) == "BlockPool(used=2/3 cached=1)"


class PoolAgainstNaiveModel(RuleBasedStateMachine):
    """The pool beside lists: a queue of free blocks, a list of tables, a content per block."""

    tables: Bundle[list[int]] = Bundle("tables")
    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.free = list(range(self.SIZE))
        self.held: list[list[int]] = []
        self.content: list[int | None] = [None] * self.SIZE

    @rule(target=tables, count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> list[int]:
        got = self.pool.allocate(count)
        if count > len(self.free):
            assert got is None
            table: list[int] = []
        else:
            table, self.free = self.free[:count], self.free[count:]
            assert got == table
            for block in table:
                self.content[block] = None
        self.held.append(table)
        return table

    @rule(target=tables, wanted=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    def hit(self, wanted: list[int]) -> list[int]:
        expected: list[int] = []
        for content in wanted:
            if content not in self.content:
                break
            expected.append(self.content.index(content))
        found = self.pool.find(bytes([content]) for content in wanted)
        assert found == expected
        assert self.pool.free_among(found) == sum(block in self.free for block in found)
        self.pool.take(found)
        self.free = [block for block in self.free if block not in found]
        self.held.append(found)
        return list(found)

    @rule(table=tables, content=st.integers(0, 3))
    def cache(self, table: list[int], content: int) -> None:
        if table and any(table is one for one in self.held):
            self.pool.cache(table[-1], bytes([content]))
            if content not in self.content and self.content[table[-1]] is None:
                self.content[table[-1]] = content

    @rule(table=consumes(tables))
    def give_back(self, table: list[int]) -> None:
        index = next(i for i, one in enumerate(self.held) if one == table)
        del self.held[index]
        self.pool.give_back(table)
        for block in reversed(table):
            if not any(block in one for one in self.held):
                self.free.append(block)

    @invariant()
    def no_block_is_both_free_and_referenced_and_counts_add_up(self) -> None:
        referenced = {block for table in self.held for block in table}
        assert not referenced & set(self.free)
        assert referenced | set(self.free) == set(range(self.SIZE))
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(referenced)
        assert self.pool.num_free + self.pool.num_used == self.SIZE


PoolAgainstNaiveModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
TestPoolAgainstNaiveModel = PoolAgainstNaiveModel.TestCase
