"""Stores of islands that fail on purpose: they kill, pause, refuse, forget an answer; and one that tells of misuse."""

import itertools

from jaxdist import islands
from jaxdist.islands import protocol

# The probe of `join`, which creates a name twice, reads, lists and deletes it.
PROBE_CALLS = 5


class KilledError(BaseException):
    """As by SIGKILL: nothing after it runs."""


class OverwrittenError(BaseException):
    """A name got other bytes than it had. No `Exception`, since islands try again after one."""


def wrap(store, around):
    """A store whose functions are called through `around(number, name, function, arguments)`, counted from 0."""
    calls = itertools.count()

    def wrap_function(name, function):
        return lambda *arguments: around(next(calls), name, function, arguments)

    return islands.SharedStore(*map(wrap_function, store._fields, store))


def killing(store, moment):
    """A store whose user dies before its call number `moment`."""

    def around(number, name, function, arguments):
        if number >= moment:
            raise KilledError
        return function(*arguments)

    return wrap(store, around)


def interrupted(store, moment, pause):
    """A store one of whose users makes a long pause before its call number `moment`."""

    def around(number, name, function, arguments):
        if number == moment:
            pause()
        return function(*arguments)

    return wrap(store, around)


def failing(store, moments, *, after=False):
    """A store that raises in the calls of these numbers: before it does what it is asked, or after that."""

    def around(number, name, function, arguments):
        if number not in moments:
            return function(*arguments)
        if after:
            function(*arguments)
        raise ConnectionError("503 SlowDown")

    return wrap(store, around)


def truncating(store, moment):
    """A store that returns less than it has at its call number `moment`, if that asks for bytes."""

    def around(number, name, function, arguments):
        answer = function(*arguments)
        return answer[:-1] if number == moment and name == "get" and answer else answer

    return wrap(store, around)


def written_once(store=None):
    """A store that raises `OverwrittenError` if a name gets other bytes than it has."""
    store = islands.memory() if store is None else store

    def put(name, body):
        if store.get(name) not in (None, body):
            raise OverwrittenError(name)
        store.put(name, body)

    return store._replace(put=put)


def archived(store):
    """A store, and every body and every first commit of a round that it ever had."""
    bodies, commits = {}, {}

    def put(name, body):
        bodies[name.partition("/")[2]] = body
        store.put(name, body)

    def create(name, body):
        created = store.create(name, body)
        if created and name.endswith("/commit"):
            commits.setdefault(name, protocol.parse(protocol.Commit, name, body))
        return created

    return store._replace(put=put, create=create), bodies, commits
