"""A store in a bucket of a cloud, or of a server that speaks as one."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from .base import SharedStore
from .problems import explain, is_bucket_missing
from .settings import settings_for

# Bytes of one request to a bucket.
PIECE = 8 * 2**20
# Parts of one body that are sent at once.
PARTS = 4
# Seconds that a request may take if the caller names no others: those of obstore.
REQUEST_SECONDS = 30.0
# So many pieces obstore reads at once.
TOGETHER = 10


def bucket(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    allow_http: bool | None = None,
    profile: str | None = None,
    credential_provider: Callable[[], Any] | None = None,
    timeout: float | int | None = None,
    **options: Any,
) -> SharedStore:
    """A store in a bucket, over outgoing HTTPS alone, for `join`, `status` and `read` in place of a URL.

    Needs the extra `jaxdist[islands]` (obstore). S3, Google Cloud Storage, Azure, R2 and newer MinIO create names
    conditionally; a server that ignores the condition is found by a probe when an island joins.

    *Credentials* come from the environment. For S3: `AWS_ACCESS_KEY_ID`, web identity, container and machine; where
    boto3 is installed also profiles, SSO and `~/.aws`. For Google: `GOOGLE_APPLICATION_CREDENTIALS`, or what `gcloud
    auth application-default login` leaves. For Azure: `AZURE_STORAGE_CONNECTION_STRING`, or
    `AZURE_STORAGE_ACCOUNT_NAME` with a key, token or identity.

    *Requests* carry at most 8 MiB; the pieces of a longer body are read up to ten at once where the link is fast enough
    for all of them. A request that fails is repeated by the island until its `round_timeout`, and not by obstore, whose
    ten tries take 2 to 6 s where a server answers, and up to three minutes where it does not.

    Args:
      url: such as `s3://bucket/folder`, `gs://...`, `az://container/...`.
      endpoint: of a server that is not the cloud's: MinIO, Ceph, R2.
      region: of the bucket; R2 has `auto`.
      allow_http: whether requests may go without TLS; by default if `endpoint` begins with `http://`.
      profile: of `~/.aws`, through boto3, before credentials of the environment.
      credential_provider: returns credentials, as obstore's `auth` providers.
      timeout: seconds that a request may take, with its bytes: 30 by default, for 9 Mbit/s up and 2.2 down; more for
        slower links.
      **options: passed on to `obstore.store.from_url`, such as `access_key_id=` or `client_options=`.

    Raises:
      ImportError: obstore is not installed, or `profile` needs boto3.
      ValueError: the URL or an option is mistyped, or there is no such profile.
      PermissionError: the environment names an endpoint without TLS, which `allow_http` does not allow.

    Examples:
      >>> from jaxdist.islands import bucket
      >>> bucket("memory:///").list("")
      []
    """
    options |= {"endpoint": endpoint, "region": region, "credential_provider": credential_provider}
    options = {name: value for name, value in options.items() if value is not None}
    place = open_bucket(url, options, allow_http=allow_http, profile=profile, timeout=timeout)
    functions = (place.create, place.put, place.get, place.list, place.delete, place.delete_many, place.read)
    return SharedStore(*(_explaining(url, function) for function in functions))


def open_bucket(url: str, options: Mapping[str, Any], **choices: Any) -> "_Bucket":
    """Opens a bucket, whose requests raise what obstore raises; the choices are those of `settings_for`."""
    obstore, settings = import_obstore(url), settings_for(url, options, **choices)
    try:
        opened = obstore.store.from_url(url, **settings)
    except (ValueError, TypeError, obstore.exceptions.BaseError) as error:
        raise ValueError(f"{url} cannot be opened: {explain(error, url).args[0]}") from error
    return _Bucket(opened, choices.get("timeout") or REQUEST_SECONDS)


def import_obstore(place: Any) -> Any:
    """Imports obstore, which a place needs."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ImportError(
            f"{place} is a bucket, which needs obstore: pip install '.[islands]' in a clone of jaxdist"
        ) from error
    return obstore


class _Bucket:
    """The functions of a `SharedStore` for a store of obstore, and those of parts, files and sizes."""

    def __init__(self, place: Any, seconds: float = REQUEST_SECONDS):
        self._obstore, self._place, self._seconds = import_obstore(place), place, seconds

    def create(self, name: str, body: bytes) -> bool:
        try:
            self._obstore.put(self._place, name, body, mode="create", use_multipart=False)
            return True
        except self._obstore.exceptions.AlreadyExistsError as error:
            refused = error
        # S3 also refuses one of two that create a name at the same moment (409): then none of them may have.
        if self.get(name) is None:
            raise ConnectionError(f"{name} was neither created nor is it there") from refused
        return False

    def put(self, name: str, body: bytes | Path) -> None:
        self._obstore.put(self._place, name, body, chunk_size=PIECE, max_concurrency=PARTS)

    def get(self, name: str) -> bytes | None:
        try:
            return self._read_whole(name)
        except FileNotFoundError as error:
            return _none_unless_bucket_is_missing(error)

    def read(self, name: str, start: int, end: int) -> bytes | None:
        try:
            # No byte of an empty body can be asked for.
            read = self._obstore.get_range
            return bytes(read(self._place, name, start=start, end=end)) if end > start else b""
        except FileNotFoundError as error:
            return _none_unless_bucket_is_missing(error)

    def _read_whole(self, name: str) -> bytes:
        started = time.monotonic()
        try:
            # The answer to the first piece tells the size, so that no byte is asked for twice.
            found = self._obstore.get(self._place, name, options={"range": (0, PIECE)})
        except self._obstore.exceptions.GenericError as error:
            # No byte of an empty body can be asked for.
            if "416" in str(error) or "StartTooLarge" in str(error):
                return bytes(self._obstore.get(self._place, name).bytes())
            raise
        size, pieces = found.meta["size"], [bytes(found.bytes())]
        seconds = time.monotonic() - started
        starts = range(PIECE, size, PIECE)
        # The time limit of a request includes its bytes: pieces that share a slow link would all miss it.
        together = TOGETHER if seconds * TOGETHER < self._seconds / 2 else 1
        for first in range(0, len(starts), 2 * together):
            pieces += self._read_pieces(name, starts[first : first + 2 * together], size)
        return b"".join(pieces)

    def _read_pieces(self, name: str, starts: Sequence[int], size: int) -> list[bytes]:
        """Reads neighboring pieces; every second one first, since obstore joins neighbors to one request."""
        found: dict[int, bytes] = {}
        for some in (starts[0::2], starts[1::2]):
            if some:
                ends = [min(start + PIECE, size) for start in some]
                read = self._obstore.get_ranges(self._place, name, starts=list(some), ends=ends, coalesce=0)
                found |= {start: bytes(piece) for start, piece in zip(some, read)}
        return [found[start] for start in starts]

    def sizes(self, prefix: str) -> dict[str, int]:
        # Object stores list whole folders: the rest of the prefix is for us to compare.
        chunks = self._obstore.list(self._place, prefix.rpartition("/")[0] or None)
        found = {entry["path"]: entry["size"] for chunk in chunks for entry in chunk}
        return {name: size for name, size in found.items() if name.startswith(prefix)}

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def delete(self, name: str) -> None:
        self.delete_many([name])

    def delete_many(self, names: Sequence[str]) -> None:
        try:
            self._obstore.delete(self._place, [*names])
        except FileNotFoundError as error:
            _none_unless_bucket_is_missing(error)
            # Some clouds stop at a name that is not there.
            for name in names if len(names) > 1 else ():
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._place, name)


def _none_unless_bucket_is_missing(error: FileNotFoundError) -> None:
    # What is missing in a bucket that is missing would look like an empty run.
    if is_bucket_missing(error):
        raise error


def _explaining(url: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises what the library reports as an `OSError` of one line that names the cure."""
    errors = (import_obstore(url).exceptions.BaseError, FileNotFoundError)

    @wraps(function)
    def ask(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except errors as error:
            raise explain(error, url) from error

    return ask


def pieces(name: str, size: int | None) -> Iterable[tuple[str, int, int | None]]:
    """Returns the requests for the bytes of a name."""
    if size is None:
        return [(name, 0, None)]
    # An empty body is one request too.
    return [(name, start, min(start + PIECE, size)) for start in range(0, max(size, 1), PIECE)]
