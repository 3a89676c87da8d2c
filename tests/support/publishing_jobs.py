"""Jobs of several processes that publish, as threads of one process: each has some of its devices."""

import sys
import threading
from unittest import mock

import jax
from island_stores import KilledError

from jaxdist import publish
from jaxdist.publish import group, layout


class Coordination:
    """JAX's coordination service, as its client shows it to all processes."""

    def __init__(self):
        self.texts, self.changed, self.is_gone = {}, threading.Condition(), False

    def end(self):
        """As where process 0 has died: every request fails."""
        with self.changed:
            self.is_gone = True
            self.changed.notify_all()

    def _check(self):
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: the coordination service is gone")

    def key_value_set(self, key, text):
        with self.changed:
            self._check()
            assert key not in self.texts, f"{key} was set before"
            self.texts[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            is_there = self.changed.wait_for(lambda: self.is_gone or key in self.texts, milliseconds / 1000)
            self._check()
            if not is_there:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.texts[key]

    def key_value_dir_get(self, folder):
        with self.changed:
            self._check()
            return [(key, text) for key, text in self.texts.items() if key.startswith(folder)]

    def key_value_delete(self, key):
        with self.changed:
            for old in [old for old in self.texts if old == key or old.startswith(f"{key}/")]:
                del self.texts[old]


class Job:
    """The publishers of the processes of a job, each with a store of its own, or the same."""

    def __init__(self, stores, **options):
        self.coordination, self.processes = Coordination(), []
        for number, store in enumerate(stores):
            own = group.Group(self.coordination, "publish/0", number, len(stores))
            with mock.patch.object(sys.modules["jaxdist.publish.publisher"], "open_group", lambda own=own: own):
                self.processes.append(publish.open(store, **options))

    def put(self, params, step):
        for process in self.processes:
            process.put(params, step=step)

    def call(self, name):
        """Calls a method in all processes at once; raises the first error."""
        errors = []

        def call_one(process):
            try:
                getattr(process, name)()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call_one, args=(process,)) for process in self.processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def kill(self):
        """As where one process dies and the launcher ends the others: their threads send nothing more."""
        self.coordination.end()
        for process in self.processes:
            process._stop()
        for process in self.processes:
            if process._thread is not None:
                process._thread.join()
            # Whoever flushes is gone, too.
            with process._changed:
                process._error = process._error or KilledError()
                process._changed.notify_all()


def share_devices(monkeypatch, processes):
    """Gives each of so many processes an equal number of the devices."""
    each = jax.device_count() // processes
    monkeypatch.setattr(layout, "process_of", lambda device: device.id // each)
    monkeypatch.setattr(group, "PATIENCE", 0.02)
    monkeypatch.setattr(group, "PAUSES", (0.001, 0.001))
