"""The exceptions of published weights, and what they have in common."""

from .._core.checks import Portable


class PublishError(Portable, RuntimeError):
    """The base of the exceptions of `jaxdist.publish`."""


class SecondPublisherError(PublishError):
    """A newer publisher writes to the same place: this one is refused, and has published nothing since."""


class PublishMismatchError(PublishError, ValueError):
    """The place holds parameters of other names, shapes or dtypes, or of another format; it names the first one."""


class NothingPublishedError(PublishError, ValueError):
    """Nothing was ever published in this place."""


class PublishOfflineError(PublishError):
    """The store refused a request, or was out of reach for `patience` seconds; it says why."""


class PublishDamagedError(PublishError):
    """Bytes in the store are missing or not those that were written, and no sound anchor came within `patience`."""
