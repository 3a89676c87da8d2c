"""Arcs and edges in groups that a single permutation carries."""

from collections.abc import Sequence


def colour_arcs(arcs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups in which no source and no destination comes twice: as few as the largest in- or out-degree.

    Kőnig's proof: where the first colour free at the source is not that free at the destination, the path of arcs that
    alternate between the two colours from the destination is recoloured.
    """
    at: tuple[dict, dict] = ({}, {})  # side -> (node, colour) -> arc

    def free(side: int, node: int) -> int:
        colour = 0
        while (node, colour) in at[side]:
            colour += 1
        return colour

    for arc in arcs:
        mine, theirs = free(0, arc[0]), free(1, arc[1])
        if mine != theirs:  # swap the colours on the path from the destination, so that `mine` is free there too
            path, side, node, colour = [], 1, arc[1], mine
            while (node, colour) in at[side]:
                path.append((at[side][node, colour], colour))
                side, node = 1 - side, path[-1][0][1 - side]
                colour = theirs if colour == mine else mine
            for other, colour in path:
                for side in (0, 1):
                    del at[side][other[side], colour]
            for other, colour in path:
                for side in (0, 1):
                    at[side][other[side], theirs if colour == mine else mine] = other
        at[0][arc[0], mine] = at[1][arc[1], mine] = arc
    groups: dict[int, list[tuple[int, int]]] = {}
    for (_, colour), arc in at[0].items():
        groups.setdefault(colour, []).append(arc)
    return [sorted(groups[colour]) for colour in sorted(groups)]


def colour_edges(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Matchings, in which no worker comes twice: at most one more than the largest degree (Misra and Gries).

    Where workers fall into two sides, as in trees and even rings, as many as the largest degree.
    """
    side = _sides(edges)
    if side is not None:
        arcs = colour_arcs([(i, j) if side[i] else (j, i) for i, j in edges])
        return [sorted((min(arc), max(arc)) for arc in group) for group in arcs]
    at: dict[tuple[int, int], int] = {}  # (node, colour) -> neighbour
    colours: dict[tuple[int, int], int] = {}

    def free(node: int) -> int:
        colour = 0
        while (node, colour) in at:
            colour += 1
        return colour

    def paint(x: int, y: int, colour: int) -> None:
        colours[min(x, y), max(x, y)] = colour
        at[x, colour], at[y, colour] = y, x

    def clear(x: int, y: int) -> int:
        colour = colours.pop((min(x, y), max(x, y)))
        del at[x, colour], at[y, colour]
        return colour

    def swap(node: int, first: int, second: int) -> None:
        """Exchanges two colours on the path from `node` that starts with `first`."""
        path, colour = [], first
        while (node, colour) in at:
            path.append((node, at[node, colour], colour))
            node, colour = at[node, colour], second if colour == first else first
        for x, y, _ in path:
            clear(x, y)
        for x, y, colour in path:
            paint(x, y, second if colour == first else first)

    for x, y in edges:
        fan = [y]
        while True:  # grow: the next neighbour's edge has a colour that is free at the last one
            grown = next(
                (n for (node, c), n in at.items() if node == x and n not in fan and (fan[-1], c) not in at), None
            )
            if grown is None:
                break
            fan.append(grown)
        mine, theirs = free(x), free(fan[-1])
        if mine != theirs:
            swap(x, theirs, mine)
        for end, node in enumerate(fan):  # the longest prefix that is still a fan and ends where `theirs` is free
            if end and (fan[end - 1], colours[min(x, node), max(x, node)]) in at:
                break
            if (node, theirs) not in at:
                last = end
        for end in range(last):  # rotate
            paint(x, fan[end], clear(x, fan[end + 1]))
        paint(x, fan[last], theirs)
    groups: dict[int, list[tuple[int, int]]] = {}
    for edge, colour in sorted(colours.items()):
        groups.setdefault(colour, []).append(edge)
    return [groups[colour] for colour in sorted(groups)]


def _sides(edges: Sequence[tuple[int, int]]) -> dict[int, bool] | None:
    """The side of each worker, if every edge joins the two sides."""
    neighbours: dict[int, list[int]] = {}
    for i, j in edges:
        neighbours.setdefault(i, []).append(j)
        neighbours.setdefault(j, []).append(i)
    side: dict[int, bool] = {}
    for first in neighbours:
        reached = [] if first in side else [first]
        side.setdefault(first, True)
        while reached:
            node = reached.pop()
            for other in neighbours[node]:
                if other not in side:
                    side[other] = not side[node]
                    reached.append(other)
    return None if any(side[i] == side[j] for i, j in edges) else side
