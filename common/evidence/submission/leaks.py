"""Find what must not be published: keys, tokens, logins, paths and addresses of a machine.

A hit names the place and the kind, never the text itself.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

ANYWHERE = {  # kind -> how it looks, in any file
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "AWS secret key": r"(?i)aws_?secret_?(access_?)?key\W{1,4}[0-9a-z/+=]{40}",
    "AWS session token": r"(?i)aws_?session_?token\W{1,4}[0-9a-z/+=]{20}",
    "NGC key": r"\bnvapi-[0-9A-Za-z_-]{20,}",
    "authorization": r"""(?i)\b(bearer|basic) +(?=[^\s"']{0,200}[0-9])[0-9a-z+/._~-]{16,}""",
    "Docker login": r'"auth" *: *"[0-9A-Za-z+/=]{12,}"',
    "npm token": r"\bnpm_[0-9A-Za-z]{36}",
    "PyPI token": r"\bpypi-[0-9A-Za-z_-]{16,}",
    "Slack webhook": r"hooks\.slack\.com/services/\w",
    "Stripe key": r"\b[rs]k_(live|test)_[0-9A-Za-z]{16,}",
    "Databricks token": r"\bdapi[0-9a-f]{32}",
    "Azure client secret": r"(?<![\w~.-])[\w~.-]{3}8Q~[\w~.-]{31,34}(?![\w~.-])",
    "Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Google access token": r"\bya29\.[0-9A-Za-z_-]{20,}",
    "Google service account key": r'"private_key_id"\s*:\s*"[0-9a-f]{20,}',
    "Azure storage key": r"\bAccountKey=[0-9A-Za-z+/]{40,}",
    "Azure shared access signature": r"[?&]sig=[0-9A-Za-z%+/]{30,}",
    "Hugging Face token": r"\bhf_[0-9A-Za-z]{30,}",
    "Weights & Biases key": r"(?i)\bwandb_v[0-9]_[0-9a-z_-]{20,}|wandb.{0,40}\b[0-9a-f]{40}\b",
    "GitHub token": r"\bgh[opsur]_[0-9A-Za-z]{36,}|\bgithub_pat_[0-9A-Za-z_]{22,}",
    "GitLab token": r"\bglpat-[0-9A-Za-z_-]{20,}",
    "Slack token": r"\bxox[abeoprs]-[0-9A-Za-z-]{10,}",
    "API key": r"\bsk-[0-9A-Za-z_-]{24,}",
    "JSON web token": r"\beyJ[0-9A-Za-z_-]{10,500}\.eyJ[0-9A-Za-z_-]{10}",
    "password": r"""(?i)\b(password|passwd|api_?key|access_?token|auth_?token|secret)["']?\s*[=:]\s*["']?"""
    r"""(?=[^\s"'(]{0,200}[0-9])[^\s"'(]{8,}""",
    "URL with a login": r"""\b[a-z][a-z0-9+.-]{1,20}://[^\s/@"'<>]+@""",
    "e-mail address": r"(?i)(?<=[\w.+-])@[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z]{2,}\b",
    "home folder": r"(?<![\w.-])/(home|Users|root)/[\w.-]+|(?i:\b[a-z]:\\+Users\\+\w)|(?<!\w)~[a-z][\w-]*/",
}
DOMAINS = (
    "com|org|net|edu|gov|mil|io|ai|cloud|eu|us|uk|de|fr|ch|at|it|es|nl|be|se|fi|dk|pl|cz|ca|jp|cn|kr|tw|au|br"
)
IN_LOGS = {  # also in what a run or a program wrote: code has such words for a reason
    "absolute path": r"(?<![\w./:~<-])/(?!(dev|proc|sys|usr)/)[A-Za-z][\w.-]*/[\w.-]",
    "storage address": r"\b(s3a?|gs|gcs|abfss?|wasbs?|hdfs)://\w",
    "IP address": r"(?<![\w.-])((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
    r"|(?<![\w:])([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])|\bfe80::[0-9a-fA-F:]+",
    "hardware address": r"(?i)(?<![\w:])([0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])",
    "GPU id": r"(?i)\b(gpu|mig)-[0-9a-f]{8}-[0-9a-f]{4}-",
    "machine id": r"(?i)\bmachine[-_ ]?id\W{1,5}[0-9a-f]{32}\b",
    "secret of the environment": r"\b[A-Za-z]\w*_(KEY|TOKEN|SECRET|PASSWORD)=[^\s$]",
    "host name": r"(?i)\b[a-z0-9]{1,63}\.(internal|local|localdomain|lan|corp|intranet|cluster)\b"
    r"|\bip-\d+-\d+-\d+-\d+\b|\"(host|hostname|node|nodename|node_?list|fqdn)\": *\"[^\"]"
    rf"|(?<![\w./@:-])(?!www\.)([a-z0-9][a-z0-9-]{{0,62}}\.){{2,8}}({DOMAINS})(?![\w-]|\.\w)"
    r"|\b(host(name)?|master_addr|slurm\w*node_?(list|name)|slurm\w*_host|lsb_hosts)=(?!localhost|127\.)\w"
    r"|\brdzv[_-]endpoint[= ]+(?!localhost|127\.)[\w\[]|[a-z0-9]\[\d+-\d+[\],]",
    "placeholder": r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*PLACEHOLDER|(?i:\byour_[a-z_]+_here\b)",
    "user name": r'(?i)"(user|username|login|logname)": *"[^"]|\b(USER|LOGNAME|USERNAME)=\w',
}
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\([/\"])")  # of JSON
VERSIONS = re.compile(r"^# versions: ")  # cuDNN 9.1.0.70 looks like an address
MAX_LENGTH = 20_000  # of a line; the longest that a run writes has a tenth of it
EVERY = {kind: re.compile(pattern) for kind, pattern in ANYWHERE.items()}
ALSO_IN_LOGS = {kind: re.compile(pattern) for kind, pattern in IN_LOGS.items()}


class Leak(NamedTuple):
    """A line, counted from 1, and the kind of what stands there."""

    line: int
    kind: str


def leaks(text: str, *, is_log: bool) -> Iterator[Leak]:
    """Yield what must not be published; `is_log` adds addresses, names, paths and placeholders."""
    kinds = EVERY | ALSO_IN_LOGS if is_log else EVERY
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        if len(line) > MAX_LENGTH:
            yield Leak(number, "line too long to be searched")
            continue
        readable = ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else match[2], line)
        for kind, pattern in kinds.items():
            is_version = kind == "IP address" and VERSIONS.match(line)
            if not is_version and (pattern.search(line) or (readable != line and pattern.search(readable))):
                yield Leak(number, kind)
