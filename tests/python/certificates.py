"""Certificates of tests, made by the openssl program."""

import subprocess
from pathlib import Path


def tls_flags(folder: Path) -> list[str]:
    """Of daemons that have one certificate, its own authority."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = "req -x509 -days 30 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    names = "-subj /CN=dmuond -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *subject.split(), *names.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return [
        f"--peer_tls_ca={certificate}",
        f"--peer_tls_certificate={certificate}",
        f"--peer_tls_key={key}",
    ]
