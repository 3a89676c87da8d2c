"""Colorings of arcs and edges: groups that a single permutation can send at once."""

import itertools
from collections.abc import Container, Sequence


def color_arcs(arcs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups in which no source and no destination comes twice; their number is the largest in- or out-degree.

    Kőnig's proof: where the first color free at the source is not free at the destination, the path of arcs from the
    destination that alternates between two colors is recolored.
    """
    coloring: _ArcColoring = ({}, {})
    for arc in arcs:
        source_color, target_color = (_first_free(coloring[side], arc[side]) for side in (0, 1))
        if source_color != target_color:
            # After this, the source's color is free at the destination too.
            _swap_path(coloring, arc[1], source_color, target_color)
        coloring[0][arc[0], source_color] = coloring[1][arc[1], source_color] = arc
    groups: dict[int, list[tuple[int, int]]] = {}
    for (_, color), arc in coloring[0].items():
        groups.setdefault(color, []).append(arc)
    return [sorted(groups[color]) for color in sorted(groups)]


# For sources and for destinations: (node, color) -> arc.
_ArcColoring = tuple[dict[tuple[int, int], tuple[int, int]], dict[tuple[int, int], tuple[int, int]]]


def _swap_path(coloring: _ArcColoring, node: int, first: int, second: int) -> None:
    """Exchanges two colors on the path that enters `node`, a destination, with `first`."""
    path, side, color = [], 1, first
    while (node, color) in coloring[side]:
        arc = coloring[side][node, color]
        path.append((arc, color))
        side = 1 - side
        node, color = arc[side], second if color == first else first
    for arc, color in path:
        for side in (0, 1):
            del coloring[side][arc[side], color]
    for arc, color in path:
        for side in (0, 1):
            coloring[side][arc[side], second if color == first else first] = arc


def _first_free(taken: Container[tuple[int, int]], node: int) -> int:
    return next(color for color in itertools.count() if (node, color) not in taken)


def color_edges(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Matchings, in which no worker comes twice: at most one more than the largest degree (Misra and Gries).

    In bipartite graphs, as trees and even rings, their number is the largest degree.
    """
    side = _sides(edges)
    if side is not None:
        arcs = color_arcs([(i, j) if side[i] else (j, i) for i, j in edges])
        return [sorted((min(arc), max(arc)) for arc in group) for group in arcs]
    coloring = _EdgeColoring()
    for x, y in edges:
        coloring.add(x, y)
    groups: dict[int, list[tuple[int, int]]] = {}
    for edge, color in sorted(coloring.colors.items()):
        groups.setdefault(color, []).append(edge)
    return [groups[color] for color in sorted(groups)]


class _EdgeColoring:
    """A proper coloring of edges, to which edges are added one by one (Misra and Gries).

    Attributes:
      colors: of each edge, with the smaller number first.
      neighbor: `(node, color) -> neighbor` along the edge of that color.
    """

    def __init__(self) -> None:
        self.colors: dict[tuple[int, int], int] = {}
        self.neighbor: dict[tuple[int, int], int] = {}

    def add(self, x: int, y: int) -> None:
        """Colors the edge from `x` to `y`, which may change the colors of others."""
        fan = self._fan(x, y)
        color_of_x, color_of_last = _first_free(self.neighbor, x), _first_free(self.neighbor, fan[-1])
        if color_of_x != color_of_last:
            # Now `color_of_last` is free at `x` too.
            self._swap_path(x, color_of_last, color_of_x)
        # The longest prefix that is still a fan and ends where `color_of_last` is free.
        last = 0
        for end, node in enumerate(fan):
            if end and (fan[end - 1], self.colors[min(x, node), max(x, node)]) in self.neighbor:
                break
            if (node, color_of_last) not in self.neighbor:
                last = end
        # Rotation: each edge of the fan takes the color of the next.
        for end in range(last):
            self._color(x, fan[end], self._uncolor(x, fan[end + 1]))
        self._color(x, fan[last], color_of_last)

    def _fan(self, x: int, y: int) -> list[int]:
        """Neighbors of `x` from `y` on; the color of each one's edge is free at the one before."""
        fan = [y]
        while True:
            # A neighbor whose edge has a color that is free at the last one.
            candidates = (
                n for (node, color), n in self.neighbor.items() if node == x and (fan[-1], color) not in self.neighbor
            )
            following = next((n for n in candidates if n not in fan), None)
            if following is None:
                return fan
            fan.append(following)

    def _swap_path(self, node: int, first: int, second: int) -> None:
        """Exchanges two colors on the path from `node` that starts with `first`."""
        path, color = [], first
        while (node, color) in self.neighbor:
            path.append((node, self.neighbor[node, color], color))
            node, color = self.neighbor[node, color], second if color == first else first
        for x, y, _ in path:
            self._uncolor(x, y)
        for x, y, color in path:
            self._color(x, y, second if color == first else first)

    def _color(self, x: int, y: int, color: int) -> None:
        self.colors[min(x, y), max(x, y)] = color
        self.neighbor[x, color], self.neighbor[y, color] = y, x

    def _uncolor(self, x: int, y: int) -> int:
        color = self.colors.pop((min(x, y), max(x, y)))
        del self.neighbor[x, color], self.neighbor[y, color]
        return color


def _sides(edges: Sequence[tuple[int, int]]) -> dict[int, bool] | None:
    """The side of each worker if the graph is bipartite, else `None`."""
    neighbors: dict[int, list[int]] = {}
    for i, j in edges:
        neighbors.setdefault(i, []).append(j)
        neighbors.setdefault(j, []).append(i)
    side: dict[int, bool] = {}
    for first in neighbors:
        reached = [] if first in side else [first]
        side.setdefault(first, True)
        while reached:
            node = reached.pop()
            for other in neighbors[node]:
                if other not in side:
                    side[other] = not side[node]
                    reached.append(other)
    return None if any(side[i] == side[j] for i, j in edges) else side
