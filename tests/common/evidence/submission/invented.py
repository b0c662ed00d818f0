"""Invented secrets, names and places, and harmless text beside them.

In a sample `|` is left out and `{b40}` becomes 40 letters and digits, `{h32}` hexadecimal digits, `{U16}`
capitals and digits, `{x40}` Base64: so no scanner takes this file for a leak.
"""

import random
import re
import string

HEX = "0123456789abcdef"
ALPHABETS = {
    "b": string.ascii_letters + string.digits,
    "h": HEX,
    "U": string.ascii_uppercase + string.digits,
    "x": string.ascii_letters + string.digits + "+/",
}

SECRETS = {  # found in any file
    "private key": (
        "-----BEGIN RSA PRI|VATE KEY-----",
        "-----BEGIN OPENSSH PRI|VATE KEY-----",
        "-----BEGIN PRI|VATE KEY-----",
        "-----BEGIN PGP PRI|VATE KEY BLOCK-----",
        "AGE-SEC|RET-KEY-1{U58}",
    ),
    "AWS access key": ("AK|IA{U16}", "AS|IA{U16}"),
    "AWS secret key": (
        "aws_secret_acc|ess_key = {x40}",
        "AWS_SECRET_ACC|ESS_KEY={x40}",
        '"SecretAcc|essKey": "{x40}"',
    ),
    "AWS session token": ("AWS_SESS|ION_TOKEN={x200}", '"Sess|ionToken": "{x200}"'),
    "NGC key": ("nv|api-{b60}", "nv|api-stg-{b60}"),
    "authorization": (
        "Authorization: Bea|rer {b30}",
        "curl -H 'authorization: bas|ic {x24}'",
        "Authorization: tok|en {h40}",
    ),
    "Docker login": ('"au|th": "{x20}=="', '"identity|token": "{b30}"', "dckr|_pat_{b27}"),
    "npm token": ("np|m_{b36}", "//registry.npmjs.org/:_auth|Token={h36}"),
    "PyPI token": ("py|pi-AgEIcHlwaS5vcmc{b60}",),
    "Slack webhook": ("https://hooks.sla|ck.com/services/T{U8}/B{U8}/{b24}",),
    "Slack token": ("xo|xb-1234567890-{b24}", "xo|xp-1234567890-{b24}", "xa|pp-1-A{U8}-1234567890-{h32}"),
    "Stripe key": ("sk_li|ve_{b24}", "rk_li|ve_{b24}", "sk_te|st_{b24}", "wh|sec_{b32}"),
    "Databricks token": ("da|pi{h32}", "da|pi{h32}-2"),
    "Azure client secret": ("{b3}8|Q~{b34}",),
    "Azure storage key": ("DefaultEndpointsProtocol=https;Account|Key={x86}==",),
    "Azure shared access signature": ("https://acme.blob.core/x?sv=2024-01-01&si|g={b43}%3D",),
    "Google API key": ("AI|za{b35}",),
    "Google access token": ("ya|29.{b60}", "GOC|SPX-{b28}"),
    "Google service account key": ('"private|_key_id": "{h40}"',),
    "Hugging Face token": ("h|f_{b34}", "api|_org_{b34}"),
    "Weights & Biases key": ("WANDB_API|_KEY={h40}", "wan|db_v1_{b40}", "wandb login {h40}"),
    "GitHub token": ("gh|p_{b36}", "gh|o_{b36}", "gh|s_{b36}", "gh|r_{b36}", "github|_pat_{b22}_{b59}"),
    "GitLab token": ("gl|pat-{b20}", "gl|dt-{b20}", "gl|rt-{b20}", "gl|cbt-64_{b20}"),
    "API key": ("s|k-{b48}", "s|k-proj-{b48}", "s|k-ant-api03-{b48}", "SG|.{b22}.{b43}", "hv|s.{b24}"),
    "JSON web token": ("ey|JhbGciOiJIUzI1NiJ9.ey|JzdWIiOiJqYW5lIn0.{b43}",),
    "password": (
        "pass|word = hunter22",
        "POSTGRES_PASS|WORD: hunter22",
        '"acc|ess_token": "{b20}"',
        "api_k|ey: '{b24}'",
        "X-Api-K|ey: {b32}",
        "sshpass -p hun|ter22 ssh",
        "machine example.org login jane pass|word hunter22",
        "mysql --pass|word hunter22",
        "hub login --tok|en {b30}",
    ),
    "secret of the environment": (
        "NGC_API|_KEY={b84}",
        "NGC_CLI_API|_KEY=abcdefgh",
        "MY_TO|KEN=abcdefgh",
        "export DB_SEC|RET='abcdefgh'",
        '"MLFLOW_TRACKING_PASS|WORD": "abcdefgh"',
        "COMET_API|_KEY: abcdefgh",
    ),
    "URL with a login": (
        "https://jane:hun|ter22@registry.example/simple",
        "https://token|123@git.example/x/y",
        "postgresql://jane:hun|ter22@db:5432/mlflow",
        "redis://:hun|ter22@cache:6379/0",
    ),
    "e-mail address": ("jane.doe|@example.com", "jane+mlperf|@acme-corp.co.uk"),
    "home folder": (
        "/ho|me/jane/run",
        "/Use|rs/jane/x",
        "C:\\Use|rs\\jane",
        "~jane/run",
        "/ro|ot/x",
    ),
    "storage address": (
        "s3|://acme-train/imagenet",
        "gs|://acme-train/imagenet",
        "hdfs|://namenode:8020/x",
        "abfss|://x@acme.dfs.core/x",
        "file|:///x",
        "file|://server/x",
        "smb|://server/share",
        "nfs|://server/export",
        "dbfs|:/acme/x",
    ),
    "hardware address": ("link/ether 0a:1b:2c:|3d:4e:5f", "HWaddr 0A-1B-2C-|3D-4E-5F", "0a1b.2c3d|.4e5f"),
    "GPU id": (
        "GPU 0: H100 (UUID: GPU-{h8}-|{h4}-{h4}-{h4}-{h12})",
        "MIG-{h8}-|{h4}-{h4}-{h4}-{h12}",
        "MIG-GPU-{h8}-|{h4}-{h4}-{h4}-{h12}/1/0",
        "CUDA_VISIBLE_DEVICES=GPU-|{h8}",
    ),
    "machine id": (
        "machine-id: {h32}",
        "Machine ID: {h32}",
        "Serial Number: |1560220012345",
        '"product_uuid": "{h8}-|{h4}-{h4}-{h4}-{h12}"',
        "boot id {h8}-|{h4}-{h4}-{h4}-{h12}",
    ),
}

PLACES = {  # found in logs and in descriptions of machines
    "absolute path": (
        "saved to /scratch/run",
        "directory: /projects/acme-secret/alice/mini",
        "directory: /p/scratch",
        "mounted on /net/acme and /cluster",
        "directory: /raid",
        "nas:/export/acme",
        "-I/opt/acme/include",
        "PATH=/usr/bin:/opt/acme/bin",
        "C:\\data\\acme",
        "D:/data/acme",
        "\\\\server\\share\\acme",
        "//server/share/acme",
    ),
    "IP address": (
        "rank 3 at 10.12.0.7",
        "rank 3 at 192.168.1.7:29500",
        "172.16.0.9",
        "fe80::1c2d:3eff:fe4f:5061",
        "fd00:12:34::7",
        "2001:db8:0:0:1:2:3:4",
    ),
    "host name": (
        "rank 0 at dgx017.hpc.example.com",
        "http://tracking.acme-corp.ai:5000/x",
        "http://tracking:5000",
        "tcp://dgx017:29400",
        "rank 3 at gpu-17.cluster",
        "gpu17.internal",
        "ip-10-0-0-7",
        '{"hostname": "gpu17"}',
        '{"HOSTNAME": "gpu17"}',
        "hostname: gpu17",
        "HOSTNAME=dgx017",
        "MASTER_ADDR=dgx017",
        "MASTER_ADDR: dgx017",
        "torchrun --master_addr dgx017",
        "torchrun --master-addr=dgx017",
        "torchrun --rdzv-endpoint=dgx017:29400",
        "--rdzv_endpoint dgx017",
        '["--rdzv-endpoint", "dgx017:29400"]',
        "rdzv_endpoint: dgx017:29400",
        "SLURM_JOB_NODELIST=dgx017",
        "SLURMD_NODENAME=dgx017",
        "SLURM_LAUNCH_NODE_IPADDR=dgx017",
        "SLURM_TOPOLOGY_ADDR=dgx017",
        "srun --nodelist=dgx017 x",
        "srun -w dgx017 x",
        "nodes dgx[001-004] are up",
        "nodes dgx[1,3] are up",
        "PBS_O_HOST=login1",
        "LSB_HOSTS=a1 a1",
        "mpirun -H dgx17:8,dgx18:8 x",
        "mpirun --host dgx17,dgx18 x",
        "dgx17 slots=8",
        "dgx17:8",
        "step done on dgx017",
        "nid001234: done",
        "Linux node-017 5.15.0",
        "srv-acme.lan",
        "hostname: redacted01",
        "nodelist: hidden.corp",
        '"submitter": "gpu17.internal"',
        '"submission_org": "dgx017.lambda.ai"',
        "submission_org: lambda.ai:5000",
        "submission_org: Lambda, see tracking.lambda.ai",
        "system_name: gpu-80.cluster",
        "GPU-80 is down",
    ),
    "user name": ("USER=jane", '"user": "jane"', "LOGNAME: jane", "git@|login01", "jane@|dgx017:~$"),
    "placeholder": ("SUBMISSION_PLATFORM_|PLACEHOLDER", "your_|name_here"),
}

HARMLESS = (
    "/proc/cpuinfo and /dev/shm/x and /sys/class/net and /usr/lib/x",
    "samples/s, 5 and/or 6, common/run/loop.py, 1/2/3, .../jane, ./run_all.sh, ../x, ~/x",
    "torch.nn.functional, a.b.c, python 3.11.7, libcudart.so.12.4.127",
    "MASTER_ADDR=localhost --rdzv-endpoint=localhost:29400, http://127.0.0.1:8080, 0.0.0.0",
    "https://www.apache.org/licenses/LICENSE-2.0, https://pytorch.org/docs/stable",
    "https://github.com/mlcommons/training_policies, https://mlcommons.org/en",
    "basic implementation of everything, a bearer of news",
    "took 12:34:56; milestones: [400ba, 600ba]; x[0], y[1, 2]; {a: 1, b: 2}",
    "# versions: python 3.11.7, torch 2.15.0, cudnn 9.1.0.70, nccl 2.21.5",
    '"sw_notes": "cuDNN 8.9.7.29, driver 535.104.05, NCCL version 2.18.3.1"',
    "8xA100-SXM4-80GB, HGX H100, DGX A100, DGX-2, gpu0, node 0, rank 12, compute_80, sm_90",
    "max_duration: 24000sp, evaluate_every: 50ba, seed: 685759804, tokens: 5, secret: null",
    '"key": "eval_accuracy", "value": 0.7201, "metadata": {"file": "common/run/loop.py", "lineno": 287}',
    '"previous": "{h64}", # seal: {h64}',
    "tokenizer = AutoTokenizer; key=value; num_keys=5; password is not needed",
    "c10::Half, std::vector, at::Tensor, 10:20:30, mlx5_0, ib0, eth0, NCCL_SOCKET_IFNAME=ib0",
    "commit: 11a31d0d4255b451c8ced9c4a011f2591098deaa (clean); code: 956df3844408",
    "drand quicknet, round 22000000; beacon:{h64}",
    ':::MLLOG {"key": "submission_org", "value": "Lambda.ai", "metadata": {"lineno": 7}}',
    '"submitter": "h2o.ai", "system_name": "Lambda.ai 8xH100", "x": 1',
    "submission_org: h2o.ai",
    "submission_org: Lambda.ai, formerly Lambda Labs",
    "submission_platform: 8xH100 (lambda.ai)",
    "GPU-80GB x 8, GPU-141GB, 8x GPU-80G, gpu-16GiB",
    "hostname: redacted, HOSTNAME=REDACTED, nodelist: removed, user: anonymous, LOGNAME=hidden",
    '{"hostname": "redacted", "user": "unknown"}; it said hostname: redacted.',
)


def invent(sample: str) -> str:
    """Fill in a sample; always the same."""
    chance = random.Random(sample)

    def fill(match: re.Match[str]) -> str:
        text = "".join(chance.choice(ALPHABETS[match[1]]) for _ in range(int(match[2]) - 1))
        return text + "7"  # no word is all letters

    return re.sub(r"\{([bhUx])(\d+)\}", fill, sample.replace("|", ""))


def samples(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Pair each invented text with its kind."""
    return [(invent(sample), kind) for kind, texts in table.items() for sample in texts]
