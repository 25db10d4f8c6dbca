"""Lists of pages by use, against plain Python lists."""

from __future__ import annotations

import random

import pytest

from hexrt.memory.lru import Lists
from tests.seeds import seeds

NODES = 12


class Told:
    """Lists as they should be: `orders` by number, cold to hot, and when each node was last used."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.orders: dict[int, list[int]] = {number: [] for number in numbers}
        self.used = [0] * NODES
        self.clock = 0

    def list_of(self, node: int) -> int:
        return next((number for number, order in self.orders.items() if node in order), 0)

    def take_out(self, nodes: list[int]) -> None:
        for node in nodes:
            if number := self.list_of(node):
                self.orders[number].remove(node)

    def heat(self, nodes: list[int], number: int) -> None:
        for node in nodes:
            self.take_out([node])
            self.orders[number].append(node)
            self.use(node)

    def use(self, node: int) -> None:
        self.clock += 1
        self.used[node] = self.clock

    def check(self, lists: Lists) -> None:
        for number, order in self.orders.items():
            assert sorted(lists.iterate(number)) == sorted(order) and lists.size(number) == len(order)
            assert lists.front(number) == next(lists.iterate(number), -1)
        assert [lists.list_of(node) for node in range(NODES)] == [self.list_of(node) for node in range(NODES)]


@pytest.mark.parametrize("seed", seeds(30, 3000))
def test_lists_hold_what_plain_lists_hold_and_end_with_what_was_used_last(seed: int) -> None:
    chance = random.Random(seed)
    lists = Lists()
    lists.grow(NODES)
    first = lists.add_lists(4)
    numbers = tuple(range(first, first + 4))
    told = Told(numbers)
    for _ in range(60):
        nodes, number = chance.sample(range(NODES), chance.randint(1, 6)), chance.choice(numbers)
        match chance.randrange(5):
            case 0:
                told.take_out(nodes)
                lists.take_out(nodes)
            case 1:
                told.heat(nodes, number)
                lists.heat(nodes, number)
                assert list(lists.iterate(number))[-len(nodes) :] == nodes
            case 2:
                lists.touch(nodes)
                for node in nodes:
                    told.use(node)
                for touched in {lists.list_of(node) for node in nodes} - {0}:
                    members = [node for node in nodes if lists.list_of(node) == touched]
                    assert list(lists.iterate(touched))[-len(members) :] == members
            case 3:
                for node in nodes:
                    by = 1 if (old := told.list_of(node)) and (old - first) % 2 == 0 else 0
                    lists.shift(node, by)
                    if by:
                        told.take_out([node])
                        told.orders[old + 1].append(node)
            case _:
                free = [node for node in nodes if not told.list_of(node)]
                lists.put_back(free, number)
                told.orders[number].extend(free)
        told.check(lists)


def test_a_node_comes_back_to_where_its_last_use_belongs() -> None:
    lists = Lists()
    lists.grow(4)
    clean, dirty = lists.add_lists(1), lists.add_lists(1)
    lists.heat((0, 1, 2, 3), clean)
    lists.take_out((0, 3))
    lists.put_back((3, 0), clean)
    assert list(lists.iterate(clean)) == [0, 1, 2, 3]
    for node in (2, 0, 3):
        lists.shift(node, dirty - clean)
    assert (list(lists.iterate(clean)), list(lists.iterate(dirty))) == ([1], [0, 2, 3])


def test_touching_the_hottest_nodes_in_their_order_moves_none_and_counts_the_use() -> None:
    lists = Lists()
    lists.grow(3)
    number = lists.add_lists(1)
    lists.heat((0, 1, 2), number)
    before = lists.stamp(1)
    lists.touch((1, 2))
    assert list(lists.iterate(number)) == [0, 1, 2] and before < lists.stamp(1) < lists.stamp(2)
    lists.touch((2, 1))
    assert list(lists.iterate(number)) == [0, 2, 1]
