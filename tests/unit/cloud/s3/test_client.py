"""How S3Client finds credentials and its way to the store: profiles, roles, proxies, authorities."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloud.errors import Denied, Unavailable
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.s3.client import S3Client
from cloud.s3.errors import CredentialsExpired
from cloud.s3.facts import BucketFacts
from cloud.s3.store import S3Options, S3Store
from tests.support.clock import FakeClock
from tests.support.s3_account import use_account
from tests.support.s3_certificate import write_certificate
from tests.support.s3_server import S3Server

NEVER = Deadline.never()
ROOT = Path(__file__).parents[4]
NOWHERE = "s3.example.invalid"  # resolves nowhere: who reaches it went through a proxy


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@contextlib.contextmanager
def opened(endpoint: str | None, options: S3Options | None = None) -> Iterator[S3Store]:
    with contextlib.closing(S3Store("s3://bucket/runs", options or S3Options(endpoint=endpoint))) as store:
        yield store


def claim(store: S3Store | RetryingStore, key: str = "a") -> None:
    store.put_if_absent(key, b"bytes", deadline=NEVER)


class Recorder:
    """An HTTP server that remembers "METHOD target" of each request, and answers the status and body of `answer`."""

    def __init__(self, answer: Callable[[str, str], tuple[int, bytes]]) -> None:
        self.seen: list[str] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                recorder.seen.append(f"{self.command} {self.path}")
                status, body = answer(self.command, self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def role(expires_in_s: float = 6 * 3600) -> Callable[[str, str], tuple[int, bytes]]:
    """What a metadata service answers where the instance has a role."""

    def answer(method: str, path: str) -> tuple[int, bytes]:
        if method == "PUT":
            return 200, b"token"
        if path.endswith("/security-credentials/"):
            return 200, b"trainer"
        expiration = (datetime.now(UTC) + timedelta(seconds=expires_in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "ASIAROLE", "SecretAccessKey": "s", "Token": "t", "Expiration": expiration}
        return 200, json.dumps({"Code": "Success", **keys}).encode()

    return answer


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


# -------------------------------------------------------------------------------------------------------- credentials


@pytest.mark.usefixtures("no_keys")
def test_who_has_no_credentials_hears_where_to_get_them(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    with opened(server.url) as store, pytest.raises(Denied, match="give the instance a role"):
        claim(store)


@pytest.mark.usefixtures("no_keys")
def test_credentials_that_come_late_are_found(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with opened(server.url) as store:
        with pytest.raises(Denied):
            claim(store)
        profile.write_text("[default]\naws_access_key_id = AKIALATE\naws_secret_access_key = x\n")

        claim(store)

    assert server.contents() == {"runs/a": b"bytes"}


@pytest.mark.usefixtures("no_keys")
def test_a_metadata_service_that_stumbles_is_asked_again(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, stumbles = role(), [500, 500]
    with Recorder(
        lambda method, path: (stumbles.pop(), b"") if stumbles and method == "GET" else answer(method, path)
    ) as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        with opened(server.url) as store:
            claim(store)

    assert {call.access_key for call in server.calls()} == {"ASIAROLE"}


def test_a_profile_that_is_not_there_is_named(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")

    with opened(server.url) as store, pytest.raises(Denied, match="nobody"):
        claim(store)


@pytest.mark.usefixtures("no_keys")
def test_credentials_that_have_expired_are_looked_for_again(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    profile.write_text("[default]\naws_access_key_id = AKIAOLD\naws_secret_access_key = x\n")
    with opened(server.url) as bare:
        store = RetryingStore(bare, sleep=FakeClock().sleep)
        claim(store, "a")
        server.expire("AKIAOLD")
        with pytest.raises(CredentialsExpired):
            claim(store, "b")
        profile.write_text("[default]\naws_access_key_id = AKIANEW\naws_secret_access_key = x\n")

        claim(store, "c")

    assert server.calls()[-1].access_key == "AKIANEW"
    assert sorted(server.contents()) == ["runs/a", "runs/c"]


@pytest.mark.usefixtures("no_keys")
def test_a_head_with_expired_credentials_is_told_as_such(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEAD has no body: all that S3 says is 400."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    server.expire("AKIAOLD")

    with opened(server.url) as store, pytest.raises(CredentialsExpired):
        store.stat("a", deadline=NEVER)


@pytest.mark.usefixtures("no_keys")
def test_a_role_s_credentials_are_renewed_well_before_they_expire(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(role(expires_in_s=14 * 60)) as metadata, opened(server.url) as store:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{metadata.url}/role")
        claim(store, "a")
        asked = len(metadata.seen)
        claim(store, "b")

        assert len(metadata.seen) > asked
    assert {call.access_key for call in server.calls()} == {"ASIAROLE"}


# ------------------------------------------------------------------------------------------------------------ proxies


@pytest.mark.usefixtures("no_keys")
def test_a_proxy_is_used_for_s3_and_never_for_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(role()) as metadata, Recorder(lambda *_: (403, b"")) as proxy:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        with opened(f"http://{NOWHERE}") as store, pytest.raises(Denied):
            claim(store)

    assert proxy.seen == [f"PUT http://{NOWHERE}/bucket/runs/a"]
    assert [line.split()[0] for line in metadata.seen] == ["PUT", "GET", "GET"]


@pytest.mark.parametrize(
    ("proxies", "matches"),
    [
        ({}, None),
        ({"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1,169.254.169.254"}, None),
        ({"http_proxy": "http://127.0.0.1:9"}, r"botocore is too new .* NO_PROXY"),
    ],
)
def test_a_botocore_that_is_not_known_is_used_unless_metadata_would_go_through_a_proxy(
    proxies: dict[str, str], matches: str | None, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("botocore.credentials.InstanceMetadataProvider.__init__", lambda self, iam_role_fetcher: None)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    with opened(server.url) as store:
        if matches is None:
            claim(store)
        else:
            with pytest.raises(Denied, match=matches):
                claim(store)


def test_tls_goes_through_a_proxy_as_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(lambda *_: (403, b"")) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with opened(f"https://{NOWHERE}") as store, pytest.raises(Unavailable, match=r"[Pp]roxy"):
            claim(store)

    assert proxy.seen == [f"CONNECT {NOWHERE}:443"]


def test_no_proxy_is_honoured(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(lambda *_: (500, b"")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with opened(server.url) as store:
            claim(store)

    assert proxy.seen == []


# --------------------------------------------------------------------------------------------------- way to the store


def test_an_unknown_authority_is_refused_and_its_bundle_is_honoured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    with S3Server(certificate=certificate, private_key=key) as server:
        with opened(server.url) as store, pytest.raises(Denied, match="AWS_CA_BUNDLE"):
            claim(store)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))

        with opened(server.url) as store:
            claim(store)

    assert server.contents() == {"runs/a": b"bytes"}


def test_a_bundle_that_is_not_there_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nowhere.pem"))

    with (
        S3Server(certificate=certificate, private_key=key) as server,
        opened(server.url) as store,
        pytest.raises(Denied, match="AWS_CA_BUNDLE"),
    ):
        claim(store)


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ENDPOINT_URL_S3", "no-url"), ("AWS_REGION", "no region")], ids=["endpoint", "region"]
)
def test_what_the_environment_has_wrong_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)

    with opened(None) as store, pytest.raises(Denied, match=f"{value}.*{name}"):
        claim(store)


def test_the_region_is_found_as_by_the_aws_command(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    client = S3Client("bucket", server.url, connections=1)

    assert client._opened().meta.region_name == "eu-north-1"
    client.close()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_used(server: S3Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, server.url.replace("127.0.0.1", "localhost"))

    with opened(None) as store:
        claim(store)

    assert server.contents() == {"runs/a": b"bytes"}


def test_a_store_that_is_not_there_is_unavailable_and_nothing_was_sent() -> None:
    with S3Server() as server:
        pass

    with opened(server.url) as store, pytest.raises(Unavailable):
        claim(store)


def test_a_store_may_be_used_again_after_close(server: S3Server) -> None:
    with opened(server.url) as store:
        claim(store, "a")
        store.close()
        claim(store, "b")

    assert sorted(server.contents()) == ["runs/a", "runs/b"]


def test_boto3_is_loaded_by_the_first_call_and_not_before() -> None:
    program = (
        "import sys; from cloud.s3.store import S3Store; "
        "S3Store('s3://bucket').close(); print('botocore' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.strip() == "False", done.stderr


# -------------------------------------------------------------------------------------------------------------- facts


def test_facts_say_who_we_are_and_what_the_bucket_does(server: S3Server) -> None:
    server.configure(region="eu-north-1", abort_after_days=3, clock_offset_s=-100.0)

    with opened(server.url) as store:
        facts = store.facts("", deadline=NEVER)

    assert facts.clock_skew_s == pytest.approx(100.0, rel=0.5)
    assert (facts.region, facts.abort_days) == ("eu-north-1", 3)
    assert (facts.access_key_end, facts.credentials_from) == ("MPLE", "env")


def test_what_may_not_be_asked_is_unknown(server: S3Server) -> None:
    server.configure(abort_after_days=3)
    server.deny("s3:GetLifecycleConfiguration")
    server.deny("s3:GetEncryptionConfiguration")

    with opened(server.url) as store:
        facts = store.facts("", deadline=NEVER)

    assert isinstance(facts, BucketFacts)
    assert facts.abort_days is None
    assert facts.encryption is None


def test_no_lifecycle_rule_is_not_an_unknown_one(server: S3Server) -> None:
    with opened(server.url) as store:
        assert store.facts("", deadline=NEVER).abort_days == 0
