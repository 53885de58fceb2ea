"""TLS with the certificates that an operator mounts."""

import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from harness import PATIENCE, wait_until
from logging_service import Service
from nginx_server import Edge, Nginx, refusal

TEXTS = {"inputs": ["a man plays the guitar", "two dogs run"]}


def self_signed(folder: Path) -> Path:
    """A folder with a certificate for 127.0.0.1 and its key, under the names that certbot gives them."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        folder / "privkey.pem",
        "-out",
        folder / "fullchain.pem",
    ]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=PATIENCE)
    return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def nginx(edge: Edge, service: Service, certificates: Path) -> Nginx:
    return edge(service.url, certificates)


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "fullchain.pem"))


def test_vectors_over_tls(nginx: Nginx, service: Service, certificates: Path) -> None:
    found = httpx.post(f"{nginx.url}/embed", json=TEXTS, verify=trusting(certificates), timeout=PATIENCE)
    assert nginx.url.startswith("https://")
    assert found.content == httpx.post(f"{service.url}/embed", json=TEXTS, timeout=PATIENCE).content


def test_http_on_the_port_of_tls_is_refused(nginx: Nginx) -> None:
    (answer,) = nginx.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert "https" in refusal(answer, 400, "BadRequest")


@pytest.mark.parametrize(("version", "accepted"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_versions_of_tls(nginx: Nginx, version: str, accepted: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # the client would offer version 1.1 with it
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    with socket.create_connection(("127.0.0.1", nginx.port), PATIENCE) as connection:
        if accepted:
            context.wrap_socket(connection).close()
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(connection)


def test_new_certificates_are_read_on_sighup(edge: Edge, service: Service, certificates: Path, tmp_path: Path) -> None:
    """nginx keeps its connections and its process."""
    nginx = edge(service.url, certificates, EDGE_CONNECTIONS=99)
    address = ("127.0.0.1", nginx.port)
    assert ssl.get_server_certificate(address) == (certificates / "fullchain.pem").read_text()
    renewed = self_signed(tmp_path)
    for name in ("privkey.pem", "fullchain.pem"):
        shutil.copyfile(renewed / name, nginx.folder / "new")
        (nginx.folder / "new").replace(nginx.folder / name)  # nginx compares inodes and whole seconds
    nginx.process.send_signal(signal.SIGHUP)
    wait_until(lambda: ssl.get_server_certificate(address) == (renewed / "fullchain.pem").read_text())
    assert nginx.process.poll() is None
