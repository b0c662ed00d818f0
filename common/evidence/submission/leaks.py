"""Find secrets that must not be published: keys, tokens, logins, paths and addresses of a machine.

A hit names the line, the kind and the first letters, never the whole. Text is searched raw and decoded as
JSON. Each pattern takes linear time, whatever the text: a repetition is bounded, or begins only
where a word does.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from common.evidence.records import printable
from common.repository import ELSEWHERE

VALUE = r"""["']?\s{0,3}[=:]\s{0,3}["']?"""  # between a name and its value, in a shell, YAML or JSON
OPTION = r"""["',= ]{1,4}"""  # between an option and its value, in a shell or a list
SECRET = r"""(?=[^\s"'(]{0,200}[0-9])[^\s"'(]{8,}"""  # a word with a digit: prose has none
ANYWHERE = {  # kind -> how it looks, in any file
    "private key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY|\bAGE-SECRET-KE[Y]-1",
    "AWS access key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "AWS secret key": r"(?i)secret_?access_?key\W{1,5}[0-9a-z/+=]{40}"
    r"|aws_?secret(_?key)?\W{1,5}[0-9a-z/+=]{40}",
    "AWS session token": r"(?i)session_?token\W{1,5}[0-9a-z/+=]{20}",
    "NGC key": r"\bnvapi-[\w-]{20,}",
    "authorization": r"""(?i)\b(bearer|basic) {1,9}(?=[^\s"']{0,200}[0-9])[0-9a-z+/._~-]{16,}"""
    rf"|\bauthorization{VALUE}(token )?{SECRET}",
    "Docker login": r'"(auth|identitytoken)"\s?:\s?"[\w+/=-]{12,}"|\bdckr_pat_[\w-]{20,}',
    "npm token": r"\bnpm_[0-9A-Za-z]{36}|:_authToken=\w",
    "PyPI token": r"\bpypi-[\w-]{16,}",
    "Slack webhook": r"hooks\.slack\.com/services/\w",
    "Stripe key": r"\b([rs]k_(live|test)|whsec)_[0-9A-Za-z]{16,}",
    "Databricks token": r"\bdapi[0-9a-f]{32}",
    "Azure client secret": r"(?<![\w~.-])[\w~.-]{3}8Q~[\w~.-]{31,34}(?![\w~-])",
    "Google API key": r"\bAIza[\w-]{35}",
    "Google access token": r"\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",
    "Google service account key": r'"private_key_id"\s?:\s?"[0-9a-f]{20,}',
    "Azure storage key": r"\bAccountKey=[0-9A-Za-z+/]{40,}",
    "Azure shared access signature": r"[?&]sig=[0-9A-Za-z%+/]{30,}",
    "Hugging Face token": r"\b(hf|api_org)_[0-9A-Za-z]{30,}",
    "Weights & Biases key": r"(?i)\bwandb_v[0-9]_[0-9a-z_-]{20,}|wandb.{0,40}\b[0-9a-f]{40}\b",
    "GitHub token": r"\bgh[opsur]_[0-9A-Za-z]{36,}|\bgithub_pat_\w{22,}",
    "GitLab token": r"\bgl(pat|dt|rt|cbt|ptt|ft|soat|agent|imt)-[\w-]{20,}",
    "Slack token": r"\bxox[abeoprs]-[0-9A-Za-z-]{10,}|\bxapp-\d-[0-9A-Za-z-]{10,}",
    "API key": r"\bsk-[\w-]{24,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bhvs\.[\w-]{20,}",
    "JSON web token": r"\beyJ[\w-]{10,500}\.eyJ[\w-]{10}",
    "password": r"(?i)(?<![a-z])(pass(word|wd|phrase)|(api|access|auth|private)[_-]?(key|token)"
    rf"|(client_?)?secret){VALUE}{SECRET}|--(password|passwd|token|secret|api[_-]key|auth[_-]token){OPTION}"
    rf"{SECRET}|\bsshpass {{1,9}}-p|\blogin [^\s]{{1,99}} password \w",
    "secret of the environment": r"""\b[A-Z]\w*_(KEY|TOKEN|SECRET|PASSWORD)=["']?[^\s$"'<({]""",
    "URL with a login": r"""\b[a-z][a-z0-9+.-]{1,20}://[^\s/@"'<>]{1,200}@""",
    "e-mail address": r"(?i)(?<=[\w.+-])@[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63}){0,8}\.[a-z]{2,}\b",
    "home folder": r"(?<![\w.-])/(home|Users|root)/[\w.-]|(?i:\b[a-z]:\\+Users\\+\w)"
    r"|(?<!\w)~[a-z][\w-]{0,99}/",
    "storage address": r"\b(s3[an]?|gs|gcs|az|abfss?|wasbs?|hdfs|webhdfs|swift|oss|cosn?|r2|smb|cifs|nfs"
    r"|s?ftps?|scp|rsync)://\w|\b(file|dbfs):/{1,3}[\w.]",
    "hardware address": r"(?i)(?<![\w:])([0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])"
    r"|(?<![\w.])([0-9a-f]{4}\.){2}[0-9a-f]{4}(?!\w|\.\w)|guid\W{1,5}(0x)?[0-9a-f]{4}:?[0-9a-f]{4}",
    "GPU id": r"(?i)\b(gpu|mig)-(gpu-)?[0-9a-f]{8}\b",
    "machine id": r"(?i)\bmachine[-_ ]?id\W{1,5}[0-9a-f]{32}\b"
    r"|\bserial([-_ ]?(number|no))?\W{1,5}\w{0,9}\d{5}"
    r"|(?<![\w-])[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}(?![\w-])",
}
OF_COMPANIES = (
    "com|org|net|edu|gov|mil|io|ai|co|dev|app|cloud|info|biz|tech|eu|us|uk|de|fr|ch|at|it|es|nl|be|se|fi|dk|no|ie"
    "|pl|cz|gr|hu|ro|ru|ua|tr|il|sa|ae|za|ca|mx|br|jp|cn|kr|tw|hk|sg|in|au|nz|press"
)
DOMAINS = f"{OF_COMPANIES}|internal|local|localdomain|lan|corp|intranet|cluster"
PUBLIC = (  # pages that logs, descriptions and time stamps name; a company's hosts are not among them
    r"(www\.)?(([\w-]+\.)?(apache|arxiv|doi|freetsa|mlcommons|mlperf|pypi|python|pytorch|wikipedia|wikimedia)\.org"
    r"|([\w-]+\.)?(github|githubusercontent|mosaicml)\.com|([\w-]+\.)?drand\.sh|(docs|developer)\.nvidia\.com"
    r"|(timestamp\.(digicert|sectigo|globalsign|entrust)|image-net|kaggle)\.(com|org|net)|huggingface\.co"
    r"|nvcr\.io|fast\.ai|proceedings\.mlr\.press)"
)
NOBODY = (  # words in place of a name
    r"none\b|null\b|not |(redacted|removed|hidden|masked|withheld|undisclosed|unknown|anonymous"
    r"|anonymi[sz]ed)(?!\w|[.-]\w)"
)
OWN = rf"(?!localhost|127\.|0\.0\.0\.0|\[?::|{NOBODY})"  # no name of another machine follows
SIZE = r"\d{0,3}[GMT](i?B)?\b"  # GPU-80GB is no machine
IN_LOGS = {  # only in the output of a run or a program: code needs such words
    "absolute path": rf"{ELSEWHERE.pattern}|(?<!\w)[A-Za-z]:[\\/]+\w|(?<![\w\\:.])\\\\[\w.-]{{1,99}}\\+[\w$]"
    r"|(?<![\w:/.+])//[\w.-]{1,99}/[\w$]",
    "IP address": rf"(?=\d)(?<![\w.-])(?<!cudnn[ =:])(?<!cu\d\d )(?<!NCCL )(?<!version )(?<!cuDNN ){OWN}"
    r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)(?!\w|\.\w)"
    r"|(?<![\w:])([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"
    r"|(?<![\w:])([0-9a-fA-F]{1,4}:){1,6}(:[0-9a-fA-F]{1,4}){1,6}(?![\w:])",
    "host name": rf"(?i)(?<![\w.@-])(?=[a-z0-9-]{{1,63}}\.[a-z0-9])"
    rf"(?!{PUBLIC}(?![\w-]|\.\w))([a-z0-9][a-z0-9-]{{0,62}}\.){{1,8}}({DOMAINS})"
    rf"(?![\w-]|\.\w)|\bip-\d+-\d+-\d+-\d+\b|(?<=://){OWN}[a-z0-9][\w-]*(?![\w.-])"
    rf"|(?<![\w.-])(dgx|hgx|nid|node|host|gpu|compute|worker|login)(-?0\d|-\d\d)(?!{SIZE})|\b(dgx\d\d|nid\d{{5}})|\bslots=\d"
    rf"|(?<![\w-])(\w{{0,40}}_)?(host(name|s|list)?|node_?(name|list)|(master|topology)_(ip)?addr|node_ipaddr"
    rf"|fqdn|rdzv_endpoint){VALUE}{OWN}(?!\d+\b)[\w\[]"
    rf"|--?(master[_-]addr|rdzv[_-]endpoint|node_?list|hosts?){OPTION}{OWN}[\w\[]"
    rf"| -[wH] [a-z][\w.-]{{0,99}}\d"
    r"|(?<=[a-z][\w-])\[\d+([-,]\d+)+[\],]",
    "placeholder": r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*PLACEHOLDER|(?i:\byour_[a-z_]{1,99}_here\b)",
    "secret of the environment": rf"\b[A-Za-z]\w*_(KEY|TOKEN|SECRET|PASSWORD){VALUE}[^\s$\"'<({{]",
    "user name": rf"(?i)(?<![\w-])(\w{{1,20}}_)?(user(name)?|login|logname){VALUE}"
    rf"(?!{NOBODY})[a-z_]"
    r"|(?<=\w)@(?!v\d|sha\d+:)[a-z][\w-]*(?!\w|\.\w)",
}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([/\"\\bfnrt]))")  # of JSON
CONTROLS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
VERSIONS = re.compile(
    r'^# versions: |^ *"(\w*(versions?|driver)|other_software_stack)": "'
)  # 9.1.0.70 looks like an address
ANCHOR = '{"of":"'  # begins a line of anchors.jsonl, whose authority is public
STAMP = re.compile(r'(?<=["0-9]),"(url":"https?://[\w.:-]{1,200}|reply":"[\w+/=]*)"(?=[,}])')
ORGANIZATION = re.compile(  # a company's name may be its domain: Lambda.ai; the text before it is kept
    r"(?i)((?<![a-z])(?:submission_org|submission_platform|submitter|system_name)[\"\\]{0,4}"
    r"(?:,\s?[\"\\]{1,4}value[\"\\]{1,4})?\s?[:=]\s?[\"\\]{0,4}(?:[\w ,&()+-]{0,60}[ (])?)"
    rf"[a-z0-9][a-z0-9-]{{0,62}}\.(?:{OF_COMPANIES})(?!\w|[.:/@-]\w)"
)
MAX_LENGTH = 20_000  # of a line; the longest that a run writes has a tenth of it
SHOWN = 4  # first letters of a secret
EVERY = {kind: re.compile(pattern) for kind, pattern in ANYWHERE.items()}
ALSO_IN_LOGS = {kind: re.compile(pattern) for kind, pattern in IN_LOGS.items()}


class Leak(NamedTuple):
    """A line, counted from 1, the kind of secret in it, and its first letters."""

    line: int
    kind: str
    shown: str

    def __str__(self) -> str:
        return f"{self.line}: {self.kind} ({self.shown}...)"


def leaks(text: str, *, is_log: bool) -> Iterator[Leak]:
    """Yield the secrets in a text; `is_log` adds addresses, names, paths and placeholders."""
    kinds = EVERY | ALSO_IN_LOGS if is_log else EVERY
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        if line.startswith(ANCHOR):
            line = STAMP.sub("", line)
        if len(line) > MAX_LENGTH:
            yield Leak(number, "line too long to be searched", line[:SHOWN])
            continue
        forms = readings(line)
        for kind, pattern in kinds.items():
            if kind == "IP address" and VERSIONS.match(line):
                continue
            match = search(pattern, forms)
            if match and kind == "host name":
                match = search(pattern, [ORGANIZATION.sub(r"\1", form) for form in forms])
            if match:
                yield Leak(number, kind, printable(match.string[match.start() :][:SHOWN]))


def search(pattern: re.Pattern[str], forms: list[str]) -> re.Match[str] | None:
    return next(filter(None, map(pattern.search, forms)), None)


def readings(line: str) -> list[str]:
    """Return a line raw, decoded as JSON, and decoded as JSON in a string of JSON."""
    forms = [line]
    while len(forms) < 3 and "\\" in forms[-1]:
        forms.append(ESCAPE.sub(unescape, forms[-1]))
    return forms


def unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else CONTROLS.get(match[2], match[2])
