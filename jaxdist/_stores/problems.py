"""What the errors of a bucket mean: one line that names the cure, instead of a dump of the library's state."""

import re
from typing import NamedTuple


class _Meaning(NamedTuple):
    """What an error is that contains `pattern`. A `PermissionError` and a missing bucket are not tried again."""

    pattern: str
    kind: type[OSError]
    cure: str


MISSING = r"<Code>(NoSuchBucket|ContainerNotFound|ContainerBeingDeleted)<|specified bucket does not exist"
CREATE = "create the bucket first, or mend its name or the endpoint"
# Names of errors of obstore that no second try mends; all libraries raise `PermissionError` or derive from it, but it.
REFUSALS = {"PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "NotSupportedError"}
MEANINGS = (
    _Meaning(MISSING, FileNotFoundError, CREATE),
    _Meaning(
        r"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired)<|TokenRetrievalError|UnauthorizedSSOTokenError|"
        r"SSOTokenLoadError|RefreshError|token .*expired",
        PermissionError,
        "renew the credentials: `aws sso login`, `gcloud auth application-default login` or a new AWS_SESSION_TOKEN",
    ),
    _Meaning(r"<Code>RequestTimeTooSkewed<", PermissionError, "set the clock of this machine"),
    _Meaning(
        r"<Code>(InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|UnknownAccessKeyId)<",
        PermissionError,
        "mend the key and its secret: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
        "AZURE_STORAGE_CONNECTION_STRING or GOOGLE_APPLICATION_CREDENTIALS",
    ),
    # The address of the machine's own credentials, which are the last that are looked for.
    _Meaning(
        r"/latest/api/token|/latest/meta-data|169\.254\.169\.254|metadata\.google|/metadata/identity",
        ConnectionError,
        "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with boto3 "
        "installed; GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_CONNECTION_STRING; or pass credential_provider",
    ),
    _Meaning(
        r"BadScheme", PermissionError, "allow_http=True, --store allow_http=true or AWS_ALLOW_HTTP=true allow http://"
    ),
    _Meaning(r"redirect without LOCATION|<Code>PermanentRedirect<", PermissionError, "set the region of the bucket"),
    _Meaning(
        r"Account must be specified", OSError, "set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
    ),
    _Meaning(
        r"status code: 40[13]|PermissionDenied|Unauthenticated|\(code: AccessDenied\)",
        PermissionError,
        "give these credentials the rights to read, write, list and delete below this URL",
    ),
    _Meaning(
        r"POST \S+\?delete .*status code: (40[05]|501)",
        PermissionError,
        "for a server that deletes one name at a time: disable_bulk_delete=True or AWS_DISABLE_BULK_DELETE=true",
    ),
    # Not of a name, which is looked for before.
    _Meaning(r"404 Not Found", FileNotFoundError, CREATE),
    _Meaning(r"TimedOut|timed out", TimeoutError, "longer for slow links: timeout="),
)


def is_bucket_missing(error: Exception) -> bool:
    """Whether it is the bucket that is not there, and not a name in it."""
    return re.search(MISSING, str(error)) is not None


def is_refusal(error: Exception) -> bool:
    """Whether no second try mends an error: no rights, no such bucket, a file in the place of a folder."""
    names = {kind.__name__ for kind in type(error).__mro__}
    is_refused = isinstance(error, PermissionError | NotADirectoryError) or bool(names & REFUSALS)
    return is_refused or any(word in str(error) for word in ("NoSuchBucket", "ContainerNotFound"))


def explain(error: Exception, url: str) -> OSError:
    """The error in one line: what the server said, and what to do."""
    meaning = _meaning_of(error)
    return meaning.kind(f"{url}: {_say(str(error))}{meaning.cure and '; ' + meaning.cure}")


def diagnose(error: Exception) -> tuple[str, str]:
    """What an error of any store says, explained or not, and what the user must do; empty if it may pass by itself."""
    text = str(error)
    explained = next((one for one in MEANINGS if text.endswith(f"; {one.cure}")), None)
    meaning = explained or _meaning_of(error)
    said = _say(text.removesuffix(f"; {meaning.cure}"))
    if meaning.cure and meaning.kind is not TimeoutError:
        return said, meaning.cure
    is_final = is_refusal(error) or isinstance(error, FileNotFoundError)
    return said, "mend that, and start again" if is_final else ""


def _meaning_of(error: Exception) -> _Meaning:
    return next((one for one in MEANINGS if re.search(one.pattern, str(error))), _Meaning("", ConnectionError, ""))


def _say(whole: str) -> str:
    """What happened, without times, signatures and the state of the library."""
    text, _, details = whole.partition("\n\nDebug source")
    code, said = (re.search(rf"<{name}>([^<]*)</{name}>", text) for name in ("Code", "Message"))
    if code is not None:
        return f"{code[1]}{'' if said is None else ': ' + ' '.join(said[1].split())}"
    # An address may end in a signature, which gives rights to all that read it.
    text = re.sub(r"\?\S*|(?<= )in [\d.]+[mµn]?s ", "", " ".join(text.split()))
    causes = re.findall(r'"([^"\n]+)"', details) if "HTTP error" in text else []
    reason = "timed out" if "TimedOut" in details else causes[-1] if causes else ""
    return f"{text[:300]}{reason and f' ({reason})'}"
