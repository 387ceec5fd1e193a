"""Which extensions wait for which: circles among them, and agents whose order does not fit. Pure.

Extensions are loaded in the order of the agent, whatever they depend on: what is found here are warnings.

Source: requirement LOAD-06.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def circles(dependencies: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Each circle once, as the names along it, from the one that comes first in `dependencies`."""
    order = {name: place for place, name in enumerate(dependencies)}
    done: set[str] = set()
    for start in dependencies:
        if start not in done:
            yield from _circles_from(start, dependencies, order, done)


def _circles_from(
    start: str, dependencies: Mapping[str, Sequence[str]], order: Mapping[str, int], done: set[str]
) -> Iterator[list[str]]:
    """What is found on the way down from `start`, without recursion; `done` are those that need no second look."""
    path = [start]
    waiting = [iter(dependencies[start])]
    while waiting:
        following = next((name for name in waiting[-1] if name in dependencies and name not in done), None)
        if following is None:
            waiting.pop()
            done.add(path.pop())
        elif following in path:
            circle = path[path.index(following) :]
            first = min(range(len(circle)), key=lambda place: order[circle[place]])
            yield [*circle[first:], *circle[:first]]
        else:
            path.append(following)
            waiting.append(iter(dependencies[following]))


def misplaced(loaded: Sequence[str], dependencies: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, bool]]:
    """For an agent that loads these extensions in this order: (extension, what it depends on, whether that is loaded at
    all) for each dependency that is not there before it.
    """
    there: set[str] = set()
    for name in loaded:
        for wanted in dependencies.get(name, ()):
            if wanted not in there and wanted != name:
                yield name, wanted, wanted in loaded
        there.add(name)
