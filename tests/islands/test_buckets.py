"""Buckets of a real server: races, pages, refusals, answers that are late, cut or lost; and who may ask."""

import contextlib
import json
import sys
import threading
import time
from random import Random

import pytest
from buckets import KEYS, Fault, Proxy, fill, forget_credentials, post, refusal, s3_bucket, s3_server
from islands_run import method, step_of, train

from jaxdist import islands
from jaxdist._cli import main as cli
from jaxdist._stores import bucket as module
from jaxdist._stores.settings import settings_for
from jaxdist.islands.store import check_usable, open_store

pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3", reason="comes with moto: pip install 'moto[server]'")
from obstore.store import from_url  # noqa: E402


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home: no test may use the user's credentials, or depend on them."""
    forget_credentials(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def proxy(server):
    with contextlib.closing(Proxy(server)) as proxy:
        yield proxy


def test_of_many_clients_at_once_one_creates_each_name(server):
    names, clients = [f"rounds/{number}/commit" for number in range(20)], 8
    created, start = [], threading.Barrier(clients)

    def create(client):
        store = s3_bucket(server, "s3://islands/races")
        for name in names:
            start.wait()
            if store.create(name, b"%d" % client):
                created.append((name, b"%d" % client))

    threads = [threading.Thread(target=create, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = s3_bucket(server, "s3://islands/races")
    assert sorted(created) == sorted((name, store.get(name)) for name in names)


def test_listings_of_several_pages_are_whole_and_many_names_go_in_few_requests(server, proxy):
    names = sorted(f"bodies/{number // 100:08d}/{number}" for number in range(2300))
    fill(f"pages/{name}" for name in names)
    store = s3_bucket(proxy.url, "s3://islands/pages")
    assert store.list("bodies/") == names
    assert [request.method for request in proxy.requests] == ["GET"] * 3  # 1000 names a page
    assert store.list("bodies/00000022/") == names[2200:]
    proxy.requests.clear()
    store.delete_many(names[:-1])
    assert [request.method for request in proxy.requests] == ["POST"] * 3
    assert store.list("") == names[-1:]


def test_a_large_body_is_read_once_in_pieces_and_several_at_once(proxy, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 5 * 2**20)
    body = bytes(range(256)) * (33 * 2**12)  # 33 MiB
    # Several at once while these have time, however long a busy machine takes for the first.
    store = s3_bucket(proxy.url, "s3://islands/large", timeout=1000)
    store.put("body", body)
    proxy.requests.clear()

    def wait_for_another(number, method, path):
        until = time.monotonic() + 60
        while proxy.requests and proxy.most_inside < 2 and time.monotonic() < until:
            time.sleep(0.01)

    proxy.most_inside, proxy.fault = 0, wait_for_another
    assert store.get("body") == body
    assert sum(request.sent for request in proxy.requests) == len(body)
    assert len(proxy.requests) == 7
    assert all(request.range for request in proxy.requests)
    assert proxy.most_inside > 1


def test_pieces_that_would_not_be_there_in_time_come_one_after_another(proxy, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 5 * 2**20)
    monkeypatch.setattr(module, "TOGETHER", 10**9)
    body = bytes(range(256)) * (33 * 2**12)
    store = s3_bucket(proxy.url, "s3://islands/slow")
    store.put("body", body)
    proxy.most_inside = 0
    assert store.get("body") == body
    assert proxy.most_inside == 1


@pytest.mark.slow
def test_a_run_over_a_server_that_is_busy_a_third_of_the_time_has_the_bits_of_an_undisturbed_one(proxy):
    tx, random = method("4 bits with feedback"), Random(0)
    step = step_of(tx)
    _, undisturbed = train(islands.memory(), tx, "a", 3, step=step, keep_every=1)
    proxy.fault = lambda number, method, path: BUSY if random.random() < 0.3 and method in ("GET", "PUT") else None
    _, found = train(s3_bucket(proxy.url, "s3://islands/busy"), tx, "a", 3, step=step, keep_every=1)
    assert [report.digest for report in found] == [report.digest for report in undisturbed]
    assert sum(request.sent == len(BUSY.body) for request in proxy.requests) > 5


def test_bytes_that_are_cut_are_an_error_and_no_body(proxy):
    store = s3_bucket(proxy.url, "s3://islands/cut")
    store.put("body", b"x" * 1000)
    proxy.fault = lambda number, method, path: Fault(cut=400)
    with pytest.raises(ConnectionError, match="s3://islands/cut: "):
        store.get("body")
    proxy.fault = lambda number, method, path: None
    assert store.get("body") == b"x" * 1000


def test_what_was_created_although_the_answer_was_lost_is_created_once(proxy):
    store = s3_bucket(proxy.url, "s3://islands/lost")
    proxy.fault = lambda number, method, path: Fault(cut=0)
    with pytest.raises(ConnectionError):
        store.create("name", b"first")
    proxy.fault = lambda number, method, path: None
    assert not store.create("name", b"second")
    assert store.get("name") == b"first"


def test_an_answer_that_is_late_is_named_with_the_time_limit(proxy):
    store = s3_bucket(proxy.url, timeout=0.2)
    proxy.fault = lambda number, method, path: Fault(seconds=1.0)
    with pytest.raises(TimeoutError, match=r"timed out.*longer for slow links: timeout="):
        store.get("name")


BUSY = refusal(503, "SlowDown")


def ask_all(store):
    return (
        lambda: store.create("name", b"1"),
        lambda: store.put("name", b"1"),
        lambda: store.put("name", b"1" * (module.PIECE + 1)),
        lambda: store.get("name"),
        lambda: store.list("names/"),
        lambda: store.delete("name"),
        lambda: store.delete_many(["name", "other"]),
    )


def test_a_bucket_that_is_missing_is_no_empty_run(server):
    store = s3_bucket(server, "s3://missing/run")
    for ask in ask_all(store):
        with pytest.raises(FileNotFoundError, match=r"s3://missing/run: NoSuchBucket: .*create the bucket first"):
            ask()
    with pytest.raises(islands.StoreUnusableError, match="NoSuchBucket"):
        check_usable(store)


REFUSALS = {
    "expired": (
        refusal(400, "ExpiredToken", "The provided token has expired."),
        r"ExpiredToken.*renew the credentials",
    ),
    "clock": (refusal(403, "RequestTimeTooSkewed"), "set the clock of this machine"),
    "region": (refusal(301, "PermanentRedirect"), "set the region of the bucket"),
    "rights": (refusal(403, "AccessDenied"), "give these credentials the rights"),
    "no XML": (Fault(401, b"who are you?"), "give these credentials the rights"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_waiting_does_not_cure_is_a_permission_error_with_its_cure(case, proxy):
    fault, message = REFUSALS[case]
    proxy.fault = lambda number, method, path: fault
    for ask in ask_all(s3_bucket(proxy.url)):
        with pytest.raises(PermissionError, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value)
    with pytest.raises(islands.StoreUnusableError, match=message):
        check_usable(s3_bucket(proxy.url))


def test_a_server_that_deletes_one_name_at_a_time_is_named_with_its_option(server, proxy):
    refuse = refusal(501, "NotImplemented")
    proxy.fault = lambda number, method, path: refuse if method == "POST" else None
    with pytest.raises(islands.StoreUnusableError, match="disable_bulk_delete=True"):
        check_usable(s3_bucket(proxy.url))
    check_usable(s3_bucket(proxy.url, disable_bulk_delete=True))


# What the guide says that an island needs. AWS asks for the third on names alone, this server on the bucket.
NAMES, BUCKET = "arn:aws:s3:::islands/run/*", "arn:aws:s3:::islands"
RIGHTS = {
    "s3:GetObject": NAMES,
    "s3:PutObject": NAMES,
    "s3:DeleteObject": [NAMES, BUCKET],
    "s3:ListBucket": BUCKET,
}


@pytest.fixture(scope="module")
def users(server):
    """The keys of a user with these rights, and of others with all but one of them."""
    iam = boto3.client("iam", endpoint_url=server, region_name="us-east-1", **boto_keys("admin", "admin"))
    found = {}
    for number, missing in enumerate(("nothing", *RIGHTS)):
        name = f"user-{number}"
        iam.create_user(UserName=name)
        statements = [
            {"Effect": "Allow", "Action": action, "Resource": place}
            for action, place in RIGHTS.items()
            if action != missing
        ]
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        iam.put_user_policy(UserName=name, PolicyName="islands", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        found[missing] = {"access_key_id": key["AccessKeyId"], "secret_access_key": key["SecretAccessKey"]}
    return found


@pytest.fixture
def identities(server, users):
    """These users, before a server that checks signatures and rights."""
    post(f"{server}/moto-api/reset-auth", b"0")
    yield users
    post(f"{server}/moto-api/reset-auth", b"inf")


def boto_keys(key, secret):
    return {"aws_access_key_id": key, "aws_secret_access_key": secret}


def test_the_rights_of_the_guide_suffice(server, identities):
    store = s3_bucket(server, **identities["nothing"])
    _, reports = train(store, method(), "a", 3, keep_every=1)
    assert [report.counted for report in reports] == [True] * 3
    store.put("bodies/large", bytes(2 * module.PIECE))
    assert islands.status(store).round == 3


@pytest.mark.parametrize("missing", RIGHTS)
def test_a_right_that_is_missing_is_named_at_once(missing, server, identities):
    with pytest.raises(islands.StoreUnusableError, match=r"PermissionError: .*(AccessDenied|Forbidden|denied)"):
        check_usable(s3_bucket(server, **identities[missing]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"access_key_id": "AKIAXXXXXXXXXXXXXXXX"}, r"InvalidAccessKeyId.*mend the key"),
        ({"secret_access_key": "other"}, r"SignatureDoesNotMatch.*mend the key"),
    ],
)
def test_wrong_credentials_are_refused_at_once(keys, message, server, identities):
    with pytest.raises(islands.StoreUnusableError, match=message):
        check_usable(s3_bucket(server, **(identities["nothing"] | keys)))


def write_profiles(home, **profiles):
    (home / ".aws").mkdir()
    lines = [
        f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = secret\n" for name, (key, _) in profiles.items()
    ]
    (home / ".aws/credentials").write_text("\n".join(lines))
    places = [f"[profile {name}]\nregion = {region}\n" for name, (_, region) in profiles.items()]
    (home / ".aws/config").write_text("\n".join(places))


@pytest.fixture
def signed(proxy, monkeypatch):
    """Signs a request; returns the key and the region that its signature names."""

    def ask(**options):
        seen = []
        handle = proxy._answer

        def note(handler):
            seen.append(handler.headers.get("Authorization", ""))
            handle(handler)

        monkeypatch.setattr(proxy, "_answer", note)
        islands.bucket("s3://islands/run", endpoint=proxy.url, **options).get("name")
        return seen[-1].partition("Credential=")[2].split("/")[0::2][:2]

    return ask


def test_credentials_and_regions_come_from_profiles(home, signed, monkeypatch):
    write_profiles(home, default=("DEFAULT", "eu-west-1"), lab=("LAB", "us-west-2"))
    monkeypatch.setenv("AWS_PROFILE", "default")
    assert signed() == ["DEFAULT", "eu-west-1"]
    assert signed(profile="lab") == ["LAB", "us-west-2"]
    assert signed(profile="lab", region="eu-north-1") == ["LAB", "eu-north-1"]
    monkeypatch.setenv("AWS_REGION", "eu-south-1")
    assert signed() == ["DEFAULT", "eu-south-1"]
    # As with Amazon's tools, keys of the environment come before a profile of the environment, not before an argument.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert signed()[0] == "ENVIRONMENT"
    assert signed(profile="lab")[0] == "LAB"
    assert signed(**KEYS)[0] == "key"


def test_a_profile_that_is_missing_is_named(home):
    write_profiles(home, lab=("LAB", "us-west-2"))
    with pytest.raises(ValueError, match=r"s3://b/run: .*\(other\) could not be found"):
        islands.bucket("s3://b/run", profile="other")
    with pytest.raises(ValueError, match=r"a profile of ~/\.aws is for s3://, not for gs://b/run"):
        islands.bucket("gs://b/run", profile="lab")


def test_a_profile_without_boto3_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(ImportError, match=r"the profile 'lab' of ~/\.aws needs boto3: pip install boto3"):
        islands.bucket("s3://b/run")


def test_without_credentials_the_message_names_them_all(server, monkeypatch):
    # The address of a machine's own credentials, which no machine here has.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{server}/latest/api/token")
    with pytest.raises(ConnectionError, match=r"no credentials were found: set AWS_ACCESS_KEY_ID"):
        islands.bucket("s3://islands/run", endpoint=server).get("name")


def test_an_expired_login_is_named_with_its_cure(server):
    def expired():
        raise RuntimeError("TokenRetrievalError: Error when retrieving token from sso: Token has expired")

    store = islands.bucket("s3://islands/run", endpoint=server, region="us-east-1", credential_provider=expired)
    with pytest.raises(PermissionError, match=r"renew the credentials: `aws sso login`"):
        store.get("name")


def test_an_endpoint_without_tls_needs_one_permission(server, monkeypatch):
    assert s3_bucket(server).get("nothing") is None
    assert s3_bucket(server, client_options={"timeout": "9s"}).get("nothing") is None
    with pytest.raises(PermissionError, match="allow_http=True"):
        s3_bucket(server, allow_http=False).get("nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    message = rf"AWS_ENDPOINT_URL={server} has no TLS.*AWS_ALLOW_HTTP=true"
    with pytest.raises(PermissionError, match=message):
        islands.bucket("s3://islands/run", **KEYS)
    with pytest.raises(islands.StoreUnusableError, match=message):
        open_store("s3://islands/run")
    assert islands.bucket("s3://islands/run", allow_http=True, **KEYS).get("nothing") is None
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert islands.bucket("s3://islands/run", **KEYS).get("nothing") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/run", "is no bucket, such as s3://"),
        ("s3://", "is no bucket"),
        ("s3:///run", "is no bucket"),
        ("gs://", "is no bucket"),
        ("az://container/run", "set AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"),
        ("https://example.org/run", "give the address of the server as the endpoint"),
        ("http://127.0.0.1:9000/bucket", "give the address of the server as the endpoint"),
        ("s3://a bucket/run", "cannot be opened"),
        ("s3:/bucket/run", "is no URL"),
        ("s3:bucket", "is no URL"),
    ],
)
def test_a_mistyped_url_is_one_line(url, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)
    assert cli.main(["islands", url]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("jaxdist: error: ")
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_option_is_named():
    with pytest.raises(ValueError, match="'endpont' is not valid for store 'S3'"):
        islands.bucket("s3://bucket/run", endpont="x")


def test_the_connection_string_of_azure_is_read(monkeypatch):
    key = "a2V5PT0="
    parts = [
        "DefaultEndpointsProtocol=http",
        "AccountName=lab",
        f"AccountKey={key}",
        "BlobEndpoint=http://10.0.0.7/lab",
    ]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ";".join([*parts, ""]))
    settings = settings_for("az://box/run", {})
    assert settings["client_options"] == {"allow_http": True}
    found = from_url("az://box/run", **settings).config
    assert (found["account_name"], found["account_key"], found["endpoint"]) == ("lab", key, "http://10.0.0.7/lab")
    own = settings_for("az://box/run", {"account_name": "own"})
    assert own["account_name"] == "own"


def test_no_signature_is_shown(proxy):
    """Azure's rights may be in the address itself."""
    proxy.fault = lambda number, method, path: Fault(503, b"")
    address = {"account_name": "lab", "sas_key": "sv=1&sig=SECRET", "endpoint": f"{proxy.url}/lab"}
    with pytest.raises(ConnectionError) as caught:
        islands.bucket("az://box/run", **address).get("name")
    assert "503" in str(caught.value)
    assert "SECRET" not in str(caught.value)
