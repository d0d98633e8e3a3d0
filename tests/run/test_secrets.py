"""What looks like a credential, and what only looks like one."""

import re
import time
from pathlib import Path

import pytest

from trainkit.common.errors import RefusedError
from trainkit.config.loading import load
from trainkit.run import secrets

PROJECT = Path(__file__).parents[2]
HEX40 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
SECRETS = [
    # by their shape
    'requests.get(url, headers={"Authorization": "Bearer 0a1b2c3d4e5f6071"})',
    'headers = {"Authorization": "Basic dXNlcjpodW50ZXIy"}',
    'db = connect("postgres://trainer:hunter2@db.example.org/runs")',
    'slack = "xoxb-' + '1234567890-abcdefGHIJ"',
    "post('https://hooks.slack.com/services/" + "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX')",
    'git = "glpat-' + 'aB3dE5gH7jK9mN1pQ3sT"',
    'g = "ghp_' + 'aB3dE5gH7jK9mN1pQ3sTaB3dE5gH7jK9mN1p"',
    'maps = "AIza' + 'SyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q"',
    "login('hf_s3cretAAAAAAAAAAAAAAAAAAAA')",
    "client('sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2')",
    "s = 'AKIA" + "IOSFODNN7EXAMPL0'",
    "pay = 'sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc'",
    "bot = '110201543:AA" + "HdqTcvCH1vGWJxfSeofSAs0K5PALDsaw'",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    # by their name
    'WANDB_API_KEY = "s3cret"',
    f'wandb.login(key="{HEX40}")',
    f'WANDB = "{HEX40}"',
    f"wandb login {HEX40}",
    'os.environ[\\"DB_PASSWORD\\"] = \\"hunter2hunter2\\"',  # as a notebook has it
    f'os.environ[\\"WANDB\\"] = \\"{HEX40}\\"',
    f"machine api.wandb.ai login user password {HEX40[:20]}",
    'password = "hunter2"',
    'api_key: str = "k-93kd02mf83nd"',
    'hf_token = "a1b2c3d4e5f6a7b8c9d0"',
    'AWS_SECRET_ACCESS_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzKEY"',
    'if password == "hunter2":',
]
IN_SHELL_AND_YAML = [
    "machine example.org\n  login me\n  password correct-horse",
    "export AWS_SECRET_ACCESS_KEY=s3cret",
    "hf_token: s3cret1",
    "--token=s3cret",
]
INNOCENT = [
    f"wandb @ git+https://github.com/wandb/wandb@{HEX40}",
    f'WEIGHTS = {{"model.safetensors": "{HEX40}"}}',
    f'revision = "{HEX40}"',
    'url = "https://download.pytorch.org/models/resnet50-0676ba61.pth"',
    'sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"',
    "best = max(runs, key=lambda run: run.acc1)",
    'sorted(rows, key=itemgetter("name"))',
    'self.cls_token = nn.Parameter(torch.zeros(1, 1, dim), requires_grad=True)  # "token"',
    'pad_token = "<|endoftext|>"',
    'tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")',
    'api_key = os.environ["WANDB_API_KEY"]',
    'password = getpass.getpass("Password: ")',
    'password = "your-password-here"',
    'token = f"{user}-{number}"',
    'secret_name = "projects/x/secrets/y"',
    "def login(password: str, token: str | None = None) -> None:",
    'parser.add_argument("--password", help="the password of the data server")',
    'url = f"https://{user}:{password}@example.org"',
    'url = "https://user:$TOKEN@example.org"',
    'for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):',
    'key_path = "~/.ssh/id_ed25519.pub"',
    "# Bearer authentication is described in RFC 6750",
    'state_dict["head.weight"] = state_dict.pop("classifier.weight")',
    'font = "sk-learn-looks-like-a-key-but-is-none"',
    'image = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"',
    'host = "http://127.0.0.1:8080/users/x@y"',
    'model = "hf_hub:timm/resnet50.a1_in1k"',
    'password = "hunter2"  # pragma: allowlist secret',
]


@pytest.mark.parametrize("line", SECRETS)
def test_a_secret_in_code_is_found_and_taken_out(line: str) -> None:
    text = f"import os\n{line}\nend = 1\n"
    found = secrets.find(text, python=True)
    assert [finding.line for finding in found][:1] == [2]
    left = secrets.redacted(text, found)
    assert left.startswith("import os\n")
    assert left.endswith("\nend = 1\n") or "BEGIN" in line
    assert secrets.find(left, python=True) == []


@pytest.mark.parametrize("line", [*SECRETS, *IN_SHELL_AND_YAML])
def test_elsewhere_it_need_not_stand_in_quotes(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secrets.find(line, python=False)
    sparing = secrets._of_detectors(line)
    monkeypatch.setattr(secrets, "_MAY_HAVE_A_SHAPE", re.compile(""))
    assert sparing == secrets._of_detectors(line), "the detectors are asked wherever they find something"


@pytest.mark.parametrize("line", INNOCENT)
def test_what_only_looks_like_one_is_left(line: str) -> None:
    assert secrets.find(f"{line}\n", python=True) == []


SETTINGS = [
    "data.password=hunter2",
    "model.api_key=k-93kd02mf83nd",
    "data.url=https://me:hunter2@example.org/data",
    "data.headers=Bearer 0a1b2c3d4e5f6071",
    "launch.setup=[export WANDB_API_KEY=0123456789abcdef]",
    "launch.sbatch.comment=glpat-aB3dE5gH7jK9mN1pQ3sT",
    "data.root=s3://AKIAIOSFODNN7EXAMPL0:wJalrXUtnFEMI@bucket",
]


def refusal(*settings: str) -> str:
    """What is said of settings that are refused; nothing of ordinary ones."""
    try:
        secrets.refuse_settings(load("ddp", ["data.name=my:data", *settings]))
    except RefusedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_looks_like_a_secret_is_refused_without_showing_it(setting: str) -> None:
    key, _, value = setting.partition("=")
    said = refusal("model.name=my:model", setting)
    assert ".".join(key.split(".")[:2]) in said
    assert value not in said


@pytest.mark.parametrize(
    "setting",
    [
        "model.class_token=true", "model.global_pool=token", "model.token_mixer=attention12", "data.key=label",
        "launch.setup=[export WANDB_API_KEY=$MY_KEY, module load cuda/12.4, source ~/secrets.sh]",
        "launch.mail_user=me@example.org", "data.root=/scratch/password/9f86d081884c7d659a2feaa0c55ad015",
        "model.name=hf-hub:timm/resnet50.a1_in1k", "monitor.wandb_project=secret-santa-2024",
        "data.secret=/run/secrets/me", "data.password=$DATA_PASSWORD",
    ],
)  # fmt: skip
def test_an_ordinary_setting_is_none(setting: str) -> None:
    own = [] if setting.startswith("model.name") else ["model.name=my:model"]
    assert refusal(*own, setting) == ""


ORDINARY = ["train.max_steps=460", "schedule.warmup_epochs=0", "model.name=fashion_cnn", "--run-dir", "runs/ddp-0001"]


def test_ordinary_settings_and_words_need_no_detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_detectors", lambda: pytest.fail("imported"))
    secrets.refuse_settings(load("ddp", ORDINARY[:3]))
    assert [secrets.find(word, python=False) for word in ORDINARY] == [[]] * len(ORDINARY)


def test_our_own_files_hold_none_and_have_no_such_name() -> None:
    """Whoever changes one would be refused."""
    files = [file for room in ("jobs", "trainkit", "configs", "slurm") for file in (PROJECT / room).rglob("*")]
    assert [file for file in files if secrets.is_credentials(str(file.relative_to(PROJECT)))] == []
    python = {str(file): file.read_text("utf-8") for file in files if file.suffix == ".py"}
    assert [name for name, text in python.items() if secrets.find(text, python=True)] == []


def test_one_enormous_line_is_looked_through_in_seconds() -> None:
    began = time.process_time()
    secrets.find("token=" + "a1-_.:/=" * 100_000, python=False)
    assert time.process_time() - began < 5.0


CREDENTIALS = [
    ".netrc", "_netrc", ".env", ".env.local", "server.pem", "server.key", "credentials", "credentials.json",
    "id_rsa", "id_ed25519", ".npmrc", ".pypirc", ".git-credentials", "kaggle.json", "service-account-1.json",
    "service_account.json", ".htpasswd", ".aws/config", "home/.ssh/known_hosts", "token", "hf_token", "token.txt",
    "wandb-token.txt", "secrets.yaml", "client_secret_12.json", ".NETRC", "credentials.py", "x/.docker/config.json",
    "run.secret",
]  # fmt: skip
OTHERS = [
    "model.py", "secrets.py", "tokenizer.json", "tokens.py", "id_map.py", "keys.yaml", "environment.yaml", "env.py",
    "key.py", "configs/ddp.yaml", "data/credential_cards/x.jpg", ".github/workflows/test.yml", "notes.token.md",
]  # fmt: skip


def test_a_file_is_one_of_credentials_by_its_name() -> None:
    assert [name for name in (*CREDENTIALS, *OTHERS) if secrets.is_credentials(name)] == CREDENTIALS
