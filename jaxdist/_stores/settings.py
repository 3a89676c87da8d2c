"""Endpoint and credentials of a bucket: those of the caller, and what clouds' own tools read from the environment."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

# The clouds of the schemes; an address by https:// is of the cloud to which its host belongs.
CLOUDS = {"s3": "s3", "s3a": "s3", "gs": "gs"} | dict.fromkeys(("az", "azure", "adl", "abfs", "abfss"), "az")
HOSTS = {
    "amazonaws.com": "s3",
    "r2.cloudflarestorage.com": "s3",
    "core.windows.net": "az",
    "fabric.microsoft.com": "az",
}
LOCAL = ("memory", "file")
# How obstore calls the address of a server, and where it and the permission to use no TLS are read.
ENDPOINT = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}
ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
ALLOW_VARIABLES = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
# What of AZURE_STORAGE_CONNECTION_STRING obstore calls how.
CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
# With ten minutes botocore has renewed credentials before they expire: it does so ten to fifteen minutes before.
CREDENTIALS_KEPT = timedelta(minutes=10)


def settings_for(
    url: str,
    options: Mapping[str, Any],
    *,
    allow_http: bool | None = None,
    profile: str | None = None,
    timeout: float | None = None,
    repeat: bool = False,
) -> dict[str, Any]:
    """The arguments of `obstore.store.from_url` for a URL and the options of the caller.

    Obstore repeats requests that fail only if `repeat` says so.

    Raises:
      ValueError: the URL is of no bucket.
      PermissionError: the environment names an endpoint without TLS, which the caller has not allowed.
    """
    scheme = urlsplit(url).scheme
    if scheme in LOCAL:
        return dict(options)
    cloud = _cloud_of(url)
    settings: dict[str, Any] = {**options.get("config", {}), **options}
    settings.pop("config", None)
    if cloud != "s3" and profile is not None:
        raise ValueError(f"a profile of ~/.aws is for s3://, not for {url}")
    if "endpoint" in settings:
        settings[ENDPOINT[cloud]] = settings.pop("endpoint")
    if cloud == "az":
        settings = _read_connection_string() | settings
    if cloud == "s3":
        settings = _with_boto3(url, settings, profile)
    limits = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    permission = {"allow_http": True} if _allows_http(cloud, settings, allow_http) else {}
    client = {**limits, **permission, **settings.get("client_options", {})}
    retries = {} if repeat else {"retry_config": {"max_retries": 0}}
    return {**retries, **settings, "client_options": client}


def _cloud_of(url: str) -> str:
    parts = urlsplit(url)
    hosts = [cloud for host, cloud in HOSTS.items() if f".{parts.hostname or ''}".endswith(f".{host}")]
    cloud = hosts[0] if parts.scheme == "https" and hosts else CLOUDS.get(parts.scheme)
    if cloud is None or not parts.netloc:
        cure = (
            "give the address of the server as the endpoint, --store endpoint=... or endpoint="
            if parts.scheme in ("http", "https")
            else ""
        )
        raise ValueError(
            f"{url} is no bucket, such as s3://bucket/folder, gs://bucket/folder or az://container/folder"
            f"{cure and '; ' + cure}"
        )
    return cloud


def _allows_http(cloud: str, settings: Mapping[str, Any], allowed: bool | None) -> bool:
    """Whether requests may go without TLS: if the caller says so, or names such an endpoint."""
    given = settings.get(ENDPOINT[cloud])
    permission = ALLOW_VARIABLES[cloud]
    if allowed is None:
        says = os.environ.get(permission, "").lower()
        allowed = str(given).startswith("http://") or says in ("1", "true", "on", "yes", "y")
    found = {name: os.environ.get(name, "") for name in ENDPOINT_VARIABLES[cloud]}
    plain = [name for name, value in found.items() if value.startswith("http://")]
    is_allowed = allowed or settings.get("client_options", {}).get("allow_http")
    if given is None and plain and not is_allowed:
        raise PermissionError(
            f"{plain[0]}={found[plain[0]]} has no TLS: anyone on the way can read and change what is sent; if that is "
            f"right, as in a network of your own, say allow_http=True, --store allow_http=true or {permission}=true"
        )
    return bool(allowed)


def _read_connection_string() -> dict[str, str]:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = [part.partition("=") for part in text.split(";")]
    return {CONNECTION_STRING[name]: value for name, _, value in parts if name in CONNECTION_STRING}


def _with_boto3(url: str, settings: dict[str, Any], profile: str | None) -> dict[str, Any]:
    """The settings with credentials of boto3, which knows profiles and SSO, unless there are others."""
    others = {"credential_provider", "skip_signature"} | {"access_key_id", "aws_access_key_id", "AWS_ACCESS_KEY_ID"}
    is_in_environment = any(name in os.environ for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"))
    if others & {*settings} or (is_in_environment and profile is None):
        return settings
    try:
        import boto3
        import botocore.exceptions
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        name = profile or os.environ.get("AWS_PROFILE")
        if name is None:
            return settings
        raise ImportError(
            f"the profile {name!r} of ~/.aws needs boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from error
    try:
        session = boto3.Session(profile_name=profile)
        if session.get_credentials() is None:
            return settings
    except botocore.exceptions.BotoCoreError as error:
        raise ValueError(f"{url}: {error}") from error
    provider = Boto3CredentialProvider(session, ttl=CREDENTIALS_KEPT)
    # The region of the profile, which it also gives to obstore, is for those who name none.
    if "region" in settings or any(name in os.environ for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        provider.config = {}
    return settings | {"credential_provider": provider}
