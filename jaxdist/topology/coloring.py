"""Arcs and edges in groups that a single permutation carries."""

from collections.abc import Sequence


def color_arcs(arcs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups in which no source and no destination comes twice: as few as the largest in- or out-degree.

    Kőnig's proof: where the first color free at the source is not that free at the destination, the path of arcs that
    alternate between the two colors from the destination is recolored.
    """
    at: tuple[dict, dict] = ({}, {})  # side -> (node, color) -> arc

    def free(side: int, node: int) -> int:
        color = 0
        while (node, color) in at[side]:
            color += 1
        return color

    for arc in arcs:
        mine, theirs = free(0, arc[0]), free(1, arc[1])
        if mine != theirs:  # swap the colors on the path from the destination, so that `mine` is free there too
            path, side, node, color = [], 1, arc[1], mine
            while (node, color) in at[side]:
                path.append((at[side][node, color], color))
                side, node = 1 - side, path[-1][0][1 - side]
                color = theirs if color == mine else mine
            for other, color in path:
                for side in (0, 1):
                    del at[side][other[side], color]
            for other, color in path:
                for side in (0, 1):
                    at[side][other[side], theirs if color == mine else mine] = other
        at[0][arc[0], mine] = at[1][arc[1], mine] = arc
    groups: dict[int, list[tuple[int, int]]] = {}
    for (_, color), arc in at[0].items():
        groups.setdefault(color, []).append(arc)
    return [sorted(groups[color]) for color in sorted(groups)]


def color_edges(edges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Matchings, in which no worker comes twice: at most one more than the largest degree (Misra and Gries).

    Where workers fall into two sides, as in trees and even rings, as many as the largest degree.
    """
    side = _sides(edges)
    if side is not None:
        arcs = color_arcs([(i, j) if side[i] else (j, i) for i, j in edges])
        return [sorted((min(arc), max(arc)) for arc in group) for group in arcs]
    at: dict[tuple[int, int], int] = {}  # (node, color) -> neighbor
    colors: dict[tuple[int, int], int] = {}

    def free(node: int) -> int:
        color = 0
        while (node, color) in at:
            color += 1
        return color

    def paint(x: int, y: int, color: int) -> None:
        colors[min(x, y), max(x, y)] = color
        at[x, color], at[y, color] = y, x

    def clear(x: int, y: int) -> int:
        color = colors.pop((min(x, y), max(x, y)))
        del at[x, color], at[y, color]
        return color

    def swap(node: int, first: int, second: int) -> None:
        """Exchanges two colors on the path from `node` that starts with `first`."""
        path, color = [], first
        while (node, color) in at:
            path.append((node, at[node, color], color))
            node, color = at[node, color], second if color == first else first
        for x, y, _ in path:
            clear(x, y)
        for x, y, color in path:
            paint(x, y, second if color == first else first)

    for x, y in edges:
        fan = [y]
        while True:  # grow: the next neighbor's edge has a color that is free at the last one
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
            if end and (fan[end - 1], colors[min(x, node), max(x, node)]) in at:
                break
            if (node, theirs) not in at:
                last = end
        for end in range(last):  # rotate
            paint(x, fan[end], clear(x, fan[end + 1]))
        paint(x, fan[last], theirs)
    groups: dict[int, list[tuple[int, int]]] = {}
    for edge, color in sorted(colors.items()):
        groups.setdefault(color, []).append(edge)
    return [groups[color] for color in sorted(groups)]


def _sides(edges: Sequence[tuple[int, int]]) -> dict[int, bool] | None:
    """The side of each worker, if every edge joins the two sides."""
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
