#!/usr/bin/env bash
# moto 5.2.5 (ThreadedMotoServer), with obstore 0.12.1 as its client, Python 3.11 or newer.
# One expects four clients that put the same name at once to succeed, as on S3, where the last one wins: workers that
# upload equal pieces under the name of their hash do so. Seen: in most rounds one or two succeed and the others are
# answered 500, since the server throws the older object away while another thread still reads it for its ETag ("I/O
# operation on closed file"). obstore repeats such requests by itself, so that nothing shows but requests that are
# counted twice; without its retries the put ends with an error. So tests that count requests, or that allow no retries,
# fail now and then.
# Exits with an error if all clients succeed in all rounds, or none in one of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check 'moto[s3,server]==5.2.5' obstore==0.12.1
cat > "$folder/put.py" <<'PY'
import logging
import threading
import urllib.request

import obstore
from moto.server import ThreadedMotoServer
from obstore.exceptions import BaseError
from obstore.store import S3Store

CLIENTS, ROUNDS = 4, 40
BODY = bytes(4_000_000)
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()


def connect(**options):
    keys = {"region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret"}
    return S3Store("bucket", endpoint=url, client_options={"allow_http": True}, **keys, **options)


def put_at_once(store):
    """How many clients succeeded in each round, and what the others were told."""
    succeeded, errors = [], []

    def put(name, together, won):
        together.wait()
        try:
            obstore.put(store, name, BODY, use_multipart=False)
            won.append(1)
        except BaseError as error:
            errors.append(str(error))

    for number in range(ROUNDS):
        together, won = threading.Barrier(CLIENTS), []
        threads = [threading.Thread(target=put, args=(f"pieces/{number}", together, won)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bytes(obstore.get(store, f"pieces/{number}").bytes()) == BODY
        succeeded.append(len(won))
    return succeeded, errors


succeeded, errors = put_at_once(connect(retry_config={"max_retries": 0}))
print("without retries, clients that succeeded in each round:", succeeded)
assert 0 < min(succeeded) < CLIENTS
assert all("500" in error for error in errors)
succeeded, errors = put_at_once(connect())
print("with obstore's retries:", succeeded)
assert succeeded == [CLIENTS] * ROUNDS
server.stop()
PY
"$folder/venv/bin/python" "$folder/put.py" 2> "$folder/log" || { tail -n 3 "$folder/log"; exit 1; }
grep -q "closed file" "$folder/log"
