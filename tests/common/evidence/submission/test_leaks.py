"""Secrets, addresses and names of machines are found in a log, and nothing else is."""

import json
import time
from pathlib import Path

import pytest

from common.evidence.submission.leaks import leaks
from common.repository import ROOT


def kinds(text):
    return {leak.kind for leak in leaks(text, is_log=True)}


def secret(*parts):
    """Join at run time, so that no scanner takes this file for a leak."""
    return "".join(parts)


FOUND = [
    (secret("nvapi", "-", "aB3" * 20), "NGC key"),
    (secret("NGC_API", "_KEY=", "abcdefgh"), "secret of the environment"),
    (secret("MY_TOKEN", "=", "abcdefgh"), "secret of the environment"),
    (secret("Authorization: Bear", "er ", "aB3" * 10), "authorization"),
    (secret("Authorization: Bas", "ic ", "dXNlcjpwYXNzd29yZDE="), "authorization"),
    (secret('{"auth"', ': "', "dXNlcjpwYXNzd29yZA==", '"}'), "Docker login"),
    (secret("AWS_SESSION_TOKEN", " = ", "FwoGZXIv" * 10), "AWS session token"),
    (secret("npm", "_", "aB3" * 12), "npm token"),
    (secret("pypi", "-", "AgEIcHlwaS5vcmc" * 2), "PyPI token"),
    (secret("https://hooks.slack", ".com/services/", "T0/B0/x"), "Slack webhook"),
    (secret("sk", "_live_", "aB3" * 8), "Stripe key"),
    (secret("dapi", "0123456789abcdef" * 2), "Databricks token"),
    (secret("abc", "8Q~", "x" * 34), "Azure client secret"),
    (secret("-----BEGIN RSA ", "PRIVATE KEY-----"), "private key"),
    (secret("AKIA", "ABCDEFGHIJKLMNOP"), "AWS access key"),
    (secret("aws_secret_access_key", " = ", "a1B2" * 10), "AWS secret key"),
    (secret("AIza", "x" * 35), "Google API key"),
    (secret("DefaultEndpointsProtocol;AccountKey", "=", "Ab1/" * 20), "Azure storage key"),
    (secret("hf", "_", "aB3" * 12), "Hugging Face token"),
    (secret("WANDB_API_KEY", "=", "0123456789" * 4), "Weights & Biases key"),
    (secret("gh", "p_", "aB3" * 12), "GitHub token"),
    (secret("github", "_pat_", "aB3" * 12), "GitHub token"),
    ("https://jane:hunter22@registry.example/simple", "URL with a login"),
    ("https://token123@github.com/x/y", "URL with a login"),
    ("/nfs/jane.doe@example.com/x", "e-mail address"),
    (secret("saved to /", "home/jane/run"), "home folder"),
    ("C:\\Users\\jane", "home folder"),
    ("saved to /scratch/run", "absolute path"),
    ("rank 3 at 10.12.0.7", "IP address"),
    ("rank 3 at gpu-17.cluster", "host name"),
    ('{"hostname": "gpu17"}', "host name"),
    ("USER=jane", "user name"),
    ("SUBMISSION_PLATFORM_" + "PLACEHOLDER", "placeholder"),
    ("x" * 30_000, "line too long to be searched"),
    ("rank 0 at dgx017.hpc.example.com", "host name"),
    ("HOSTNAME=dgx017", "host name"),
    ("MASTER_ADDR=dgx017", "host name"),
    ("SLURM_JOB_NODELIST=dgx017", "host name"),
    ("nodes dgx[001-004] are up", "host name"),
    ("torchrun --rdzv-endpoint=dgx017:29400", "host name"),
    ("ether 0a:1b:2c:3d:4e:5f", "hardware address"),
    ("GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "GPU id"),
    ("machine-id: " + "0123456789abcdef" * 2, "machine id"),
    ("directory: /projects/acme/alice", "absolute path"),
    ("directory: /p/scratch", "absolute path"),
    ("s3://bucket/data", "storage address"),
]
NOT_FOUND = [
    "/proc/cpuinfo and /dev/shm/x and /sys/class/net and /usr/lib/x",
    "samples/s, 5 and/or 6, common/run/loop.py, 1/2/3",
    "torch.nn.functional, a.b.c, python 3.11.7",
    "MASTER_ADDR=localhost --rdzv-endpoint=localhost:29400",
    "https://www.apache.org/licenses/LICENSE-2.0",
    "basic implementation of everything, a bearer of news",
    "took 12:34:56; milestones: [400ba, 600ba]; x[0], y[1, 2]",
]


@pytest.mark.parametrize(("text", "kind"), FOUND, ids=lambda value: "")
def test_a_secret_is_found_as_it_stands_and_as_json_escapes_it(text, kind):
    assert kind in kinds(f"note {text} end")
    escaped = "".join(f"\\u{ord(c):04x}" if c.isalpha() else c for c in text).replace("/", "\\/")
    assert kind in kinds(f'"note {escaped} end"')
    assert kind in kinds(json.dumps({"value": f"note {text} end"}))


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_every_log_may_say_is_not_found(text):
    assert kinds(text) == set()


def test_nothing_is_found_in_the_committed_logs():
    files = sorted(Path(ROOT, "results").glob("reference-*/*/result_0.txt"))
    assert files and all(not kinds(file.read_text()) for file in files)


@pytest.mark.parametrize("part", ["a.", "a-", "1.", "eyJ-", "secret=", "ip-1-", "/a", "@a."])
def test_a_long_line_is_searched_in_linear_time(part):
    start = time.process_time()
    kinds((part * 20_000)[:19_990])
    assert time.process_time() - start < 1
