"""Weights that follow a trainer: published to a folder or a bucket as exact patches, for any number of followers.

Experimental: may change or go in any version.
"""

from .base import NothingPublishedError as NothingPublishedError
from .base import PublishDamagedError as PublishDamagedError
from .base import PublishError as PublishError
from .base import PublishMismatchError as PublishMismatchError
from .base import PublishOfflineError as PublishOfflineError
from .base import SecondPublisherError as SecondPublisherError
from .follower import follow as follow
from .protocol import Publication as Publication
from .protocol import PublicationPart as PublicationPart
from .publisher import Publisher as Publisher
from .publisher import open as open
from .survey import PublishStatus as PublishStatus
from .survey import clean_up as clean_up
from .survey import status as status
