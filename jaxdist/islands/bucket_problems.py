"""What the errors of a bucket mean: one line that names the cure, instead of a dump of the library's state."""

import re
from typing import NamedTuple


class _Meaning(NamedTuple):
    """What an error is that contains `pattern`. A `PermissionError` and a missing bucket are not tried again."""

    pattern: str
    kind: type[OSError]
    cure: str


MISSING = r"<Code>(NoSuchBucket|ContainerNotFound|ContainerBeingDeleted)<|specified bucket does not exist"
MEANINGS = (
    _Meaning(MISSING, FileNotFoundError, "create the bucket first, or mend its name or the endpoint"),
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
    _Meaning(r"TimedOut|timed out", TimeoutError, "longer for slow links: timeout="),
)


def is_bucket_missing(error: Exception) -> bool:
    """Whether it is the bucket that is not there, and not a name in it."""
    return re.search(MISSING, str(error)) is not None


def explain(error: Exception, url: str) -> OSError:
    """The error in one line: what the server said, and what to do."""
    whole = str(error)
    meaning = next((one for one in MEANINGS if re.search(one.pattern, whole)), _Meaning("", ConnectionError, ""))
    return meaning.kind(f"{url}: {_say(whole)}{meaning.cure and '; ' + meaning.cure}")


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
