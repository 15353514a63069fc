"""What is taken for a secret in uncommitted changes and on command lines, and what is not."""

from __future__ import annotations

import time

import pytest

from tango_hpc.runner.masks import mask_secrets, masked_command

BODY = ["MIIEowIBAAKCAQEAu1SU1LfVLPHCozMxH2Mo", "4lgOEePzNm0tRgeLezV6ffAt0gunVTLw7onL"]
KEY = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *BODY, "-----END RSA PRIVATE KEY-----"])

MASKED = [
    ("+password: hunter2", "hunter2"),
    ("  db_password: let me in, please # mine", "let me in"),
    ("-  - secret: Tr0ub4dor&3", "Tr0ub4dor&3"),
    ("+  wandb_api_key: abcdefgh", "abcdefgh"),
    ("+X_API_KEY=abcdef", "abcdef"),
    (" export DB_PASSWORD=hunter2", "hunter2"),
    ("+HF_TOKEN=abcdef python train.py", "abcdef"),
    ("+AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalr"),
    ("+password = hunter2", "hunter2"),
    ("+dsn = 'host=db password=hunter2 user=me'", "hunter2"),
    ("+connect(user, password=hunter.two)", "hunter.two"),
    ('+password: str = "hunter2"', "hunter2"),
    ('+token = b"abcdef"', "abcdef"),
    ('+os.environ["WANDB_API_KEY"] = "abcdef"', "abcdef"),
    ("+os.environ.setdefault('WANDB_API_KEY', 'abcdef')", "abcdef"),
    ('+{"client_secret": "abcdef", "a": 1}', "abcdef"),
    ("+url = 'https://user:pw@host/x'", "pw"),
    ("+git clone https://abcdef@host/x.git", "abcdef"),
    ("+redis://:hunter2@host:6379/0", "hunter2"),
    ("+postgres://me:hunt/er#2@db:5432/runs", "hunt/er#2"),
    ("+https://host/x?page=1&access_token=abcdef&b=2", "abcdef"),
    ("+Authorization: Bearer abcdef", "abcdef"),
    ("+Authorization: Basic dXNlcjpwdw==", "dXNlcjpwdw"),
    ('+headers = {"Authorization": "Bearer abcdef"}', "abcdef"),
    ('+header = "Bearer eyJhbGciOiJIUzI1NiJ9.e30.x"', "eyJhbGci"),
    ("+curl -H 'X-Api-Key: abcdef' https://host", "abcdef"),
    ("+key: sk-0123456789abcdef0123", "0123456789"),
    (KEY, BODY[1]),
    ("+" + KEY.replace("\n", "\n+"), BODY[0]),
    ('+KEY = "' + KEY.replace("\n", "\\n") + '"', BODY[0]),
    (KEY.partition("-----END")[0], BODY[1]),  # cut off
]

PLAIN = [
    "generator.max_response_tokens=128",
    "generator.max_response_tokens=100000000",
    "+  max_prompt_tokens: 1024",
    "+  micro_batch_tokens: 16384  # a GPU's",
    "+MAX_TOKENS=4096",
    "+TOKENIZERS_PARALLELISM=false",
    "tokenizer",
    "+tokenizer: Qwen/Qwen2.5-Math-1.5B",
    "tokenizer.path=/models/Qwen2.5-Math-1.5B",
    '+tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-Math-1.5B")',
    "task.last_letter.train_words=[4,5]",
    "seed=1",
    "eos_token_id=3",
    "+eos_token_id: 151645",
    "+  eos_token: <|im_end|>",
    "+eos_token = tokenizer.eos_token",
    "+token_ids = row.token_ids",
    "+    password: str,",
    "+    token: str | None = None,",
    "+    api_key: Optional[str] = None",
    '+password = os.environ["DB_PASSWORD"]',
    "+password = getpass.getpass()",
    "+login(user, password=password)",
    "+if password == other:",
    "+HF_TOKEN=$HF_TOKEN python train.py",
    "+the key of the array, and the secret of its speed",
    "+see https://docs.example.org/a/b?c=d#e and http://localhost:8000/v1/a@b",
    "+git clone ssh://git@host/x.git",
    "+data.train=hf://datasets/name@main/train.parquet",
    "+bearer of good news, basic settings",
    "+mail to me@example.org",
    "+private_keys_of = sorted(table)",
    '+"-----BEGIN CERTIFICATE-----"',
    "+    assert row.tokens == 12345678",
    "launch.nodes=2",
]


@pytest.mark.parametrize(("text", "secret"), MASKED)
def test_a_secret_in_uncommitted_changes_is_masked(text: str, secret: str) -> None:
    masked = mask_secrets(f" before\n{text}\n+after = 1\n")
    assert secret not in masked and "***" in masked
    assert masked.startswith(" before\n") and masked.endswith("\n+after = 1\n"), "nothing around it is"
    assert mask_secrets(masked) == masked


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_secrets(f" before\n{text}\n+after = 1\n") == f" before\n{text}\n+after = 1\n"
    if not text.startswith("+"):
        assert masked_command(["tango", "train", text, "seed=1"]) == ["tango", "train", text, "seed=1"]


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["--header", "Authorization: Bearer abc def"], ["--header", "Authorization: ***"]),
        (["--header=Authorization: Basic abc"], ["--header=Authorization: ***"]),
        (["-H", "Authorization:", "Bearer", "abc", "-v"], ["-H", "Authorization:", "***", "***", "-v"]),
        (["-H", "Authorization:", "Basic", "abc", "-v"], ["-H", "Authorization:", "***", "***", "-v"]),
        (["--auth", "bearer", "abc"], ["--auth", "bearer", "***"]),
        (["--header", "X-Api-Key: abc"], ["--header", "X-Api-Key:***"]),
        (["data.train=https://user:pw@host/x.parquet"], ["data.train=https://***@host/x.parquet"]),
        (["--proxy", "http://user:pw@host:3128"], ["--proxy", "http://***@host:3128"]),
        (["password:", "hunter2", "seed=1"], ["password:", "***", "seed=1"]),
        (["--passphrase", "let me in"], ["--passphrase", "***"]),
        (["X_API_KEY=abcdef"], ["X_API_KEY=***"]),
        ([f"--private-key={KEY}"], ["--private-key=***"]),
        (["hf_abcdefghijklmnop"], ["***"]),
        (["--tokens", "5", "--tokenizer", "a/b"], ["--tokens", "5", "--tokenizer", "a/b"]),
    ],
)
def test_a_secret_on_a_command_line_is_masked(words: list[str], masked: list[str]) -> None:
    assert masked_command(["tango", "train", *words]) == ["tango", "train", *masked]


@pytest.mark.parametrize("piece", ["a", " ", "token", "token=", "://", "://:", "=", "password", '"', "1", KEY, "\n+ "])
def test_a_long_line_takes_no_time(piece: str) -> None:
    start = time.process_time()
    mask_secrets(piece * (500_000 // len(piece)))
    assert time.process_time() - start < 20
