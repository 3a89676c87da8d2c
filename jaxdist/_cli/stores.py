"""`--store`: the endpoint, region and credentials of a bucket."""

from typing import Any

from .. import islands
from .spellings import grammar

EXAMPLE = "endpoint=http://10.0.0.7:9000,region=auto"


def open_store(url: str, options: str | None) -> "str | islands.SharedStore":
    """The URL as it is, or the bucket that it names with the options `KEY=VALUE,KEY=VALUE` of `islands.bucket`.

    Raises:
      ValueError: the options are no such list, or the URL is of a folder.

    Examples:
      >>> open_store("runs/run-7", None)
      'runs/run-7'
    """
    if options is None:
        return url
    if "://" not in url:
        raise ValueError(f"--store {options}: for a bucket, such as s3://bucket/run; {url} is a folder")
    found = {}
    for part in grammar.check_length(options).split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--store takes KEY=VALUE[,KEY=VALUE], such as {EXAMPLE}, got {options!r}")
        found[key.strip()] = value.strip()
    return islands.bucket(url, **{key: _read_value(key, value) for key, value in found.items()})


def _read_value(key: str, value: str) -> Any:
    """What `bucket` takes that is no text; obstore reads all of its own options from text."""
    if key == "allow_http":
        if value.lower() not in ("true", "false"):
            raise ValueError(f"--store: allow_http is true or false, got {value!r}")
        return value.lower() == "true"
    if key == "timeout":
        seconds = grammar.parse_literal(value)
        if not isinstance(seconds, int | float) or seconds <= 0:
            raise ValueError(f"--store: timeout is a number of seconds, got {value!r}")
        return seconds
    if key == "credential_provider":
        return _import_provider(value)
    return value


def _import_provider(text: str) -> Any:
    """A function that returns credentials, or what a class of such objects makes without arguments."""
    spelled = grammar.split_import(text)
    if spelled is None or spelled.arguments:
        raise ValueError(
            f"--store: credential_provider is MODULE:NAME of a function or class, such as my_keys:renew, got {text!r}"
        )
    found = grammar.import_name("credential_provider", text, spelled, ())
    if not callable(found):
        raise ValueError(
            f"--store: credential_provider {text} is a {type(found).__name__}, and not a function or class"
        )
    return found() if isinstance(found, type) else found
