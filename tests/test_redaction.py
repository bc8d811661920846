"""What a secret looks like: each kind in each place where people write one, and what must stay as it is."""

from __future__ import annotations

import base64
import json
import time
from typing import Any
from urllib.parse import quote

import pytest

from gyre.redaction import HIDDEN, Secrets, is_secret_name, shaped, values_in, values_of_environment


def alnum(count: int, seed: str = "aB3xK9mQ7zR2wL5v") -> str:
    return (seed * (count // len(seed) + 1))[:count]


HEX = "9f3c51d07be284a6"
BY_SHAPE = {
    "AWS key id": "AKIA" + alnum(16, "A2B3C4D5E6F7G8H9"),
    "AWS temporary key id": "ASIA" + alnum(16, "A2B3C4D5E6F7G8H9"),
    "Google key": "AIza" + alnum(35),
    "Google token": "ya29." + alnum(40),
    "Google client": "GOCSPX-" + alnum(28),
    "Hugging Face": "hf_" + alnum(34),
    "GitHub": "ghp_" + alnum(36),
    "GitHub app": "ghs_" + alnum(36),
    "GitHub fine-grained": "github_pat_" + alnum(60),
    "GitLab": "glpat-" + alnum(20),
    "Slack bot": "xoxb-1234567890-" + alnum(24),
    "Slack app": "xapp-1-" + alnum(24),
    "OpenAI": "sk-" + alnum(48),
    "OpenAI project": "sk-proj-" + alnum(40),
    "Anthropic": "sk-ant-api03-" + alnum(40),
    "W&B": "wandb_v1_" + alnum(40),
    "NVIDIA": "nvapi-" + alnum(40),
    "Groq": "gsk_" + alnum(40),
    "Replicate": "r8_" + alnum(37),
    "Databricks": "dapi" + alnum(32, HEX),
    "Docker": "dckr_pat_" + alnum(27),
    "Tailscale": "tskey-auth-" + alnum(24),
    "Vault": "hvs." + alnum(40),
    "npm": "npm_" + alnum(36),
    "PyPI": "pypi-AgEI" + alnum(60),
    "SendGrid": f"SG.{alnum(22)}.{alnum(43)}",
    "Stripe": "sk_live_" + alnum(24),
    "Telegram": "1234567890:AA" + alnum(33),
    "JWT": f"eyJ{alnum(20)}.eyJ{alnum(30)}.{alnum(43)}",
    "Neptune": "eyJhcGlf" + alnum(60),
    "Grafana": "glsa_" + alnum(32),
    "Sentry": "sntrys_" + alnum(60),
}
PLACES = ("{}", "401 for {}", "token {} is expired", "a='{}'", '{{"x": ["{}"]}}', "({})", "{}\n", "x {},")


@pytest.mark.parametrize("kind", BY_SHAPE)
def test_a_token_with_its_makers_mark_is_hidden_wherever_it_stands(kind: str) -> None:
    secret = BY_SHAPE[kind]
    for place in PLACES:
        shown = shaped(place.format(secret))
        assert secret not in shown
        assert secret[8:] not in shown


SECRET = "q9Zr-tN4w_xLs82"
"""Without any mark: its place alone says that it is one."""
BY_PLACE = (
    f"WANDB_API_KEY={SECRET} printed by a library",
    f"export HF_TOKEN='{SECRET}'",
    f'{{"api_key": "{SECRET}", "n": 5}}',
    f'{{\\"api_key\\": \\"{SECRET}\\"}}',
    f"{{'settings': {{'api_key': '{SECRET}'}}}}",
    f"Settings(api_key='{SECRET}', project='p')",
    f"apiKey: {SECRET}",
    f"password: {SECRET}",
    f"db_password = {SECRET}",
    f"client_secret: '{SECRET}'",
    f"aws_secret_access_key = {SECRET}",
    f"AccountName=x;AccountKey={SECRET};EndpointSuffix=core",
    f"engine --api-key {SECRET} --port 1",
    f"engine --api-key={SECRET}",
    f"['--api-key', '{SECRET}']",
    f'"--hf-token", "{SECRET}"',
    f"gyre join --token {SECRET} http://h:1",
    f"Authorization: Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"X-Api-Key: {SECRET}",
    f"Set-Cookie: {SECRET}",
    f"https://me:{SECRET}@mlflow.example/x",
    f"postgresql+psycopg://gyre:{SECRET}@db/gyre",
    f"redis://:{SECRET}@cache:6379",
    f"git clone https://{SECRET}@github.example/a/b",
    f"pip install git+https://x-access-token:{SECRET}@github.example/a/b",
    f"https://h.example/x?api_key={SECRET}&n=1",
    f"https://b.s3.example/x?X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://b.example/x?Signature={SECRET}",
    f"https://oapi.example/robot/send?access_token={SECRET}",
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://discord.com/api/webhooks/12/{SECRET}",
    f"https://x.webhook.office.com/webhookb2/{SECRET}",
    f"https://api.telegram.org/bot123:{SECRET}/sendMessage",
    f"https://open.example/open-apis/bot/v2/hook/v2/{SECRET}",
    f"the API_TOKEN is {SECRET}",
    f"SENTRY_DSN={SECRET}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\\n{SECRET}\\n-----END OPENSSH PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
)


@pytest.mark.parametrize("text", BY_PLACE)
def test_what_its_place_calls_secret_is_hidden(text: str) -> None:
    shown = shaped(text)
    assert SECRET not in shown
    assert HIDDEN in shown
    assert shaped(shown) == shown


PLAIN = (
    "step 12: loss=0.5 tokens=512 reward_mean=0.25 tokens_per_s=1234.5 pass_tokens=16384 pass@1=0.5",
    "eos_token=</s> pad_token='<|endoftext|>' bos_token: <s> stop_token_ids=[2, 0] token_id=7 first token: 5",
    "sha256:9f3c51d07be284a69f3c51d07be284a69f3c51d07be284a69f3c51d07be284a6",
    "digest=9f3c51d07be284a6 commit 9f3c51d07be284a69f3c51d07be284a69f3c51d0 xxh3 9f3c51d07be284a6",
    "model Qwen/Qwen3-0.6B from /models/Qwen3-0.6B, checkpoint s3://bucket/run-7/step-100",
    "rollout-0.1 joined as 10.0.0.5:7000; job golden-1-20260101T000000 id 550e8400-e29b-41d4-a716-446655440000",
    "http://127.0.0.1:8265/api/v1/jobs/golden-1/events?after=12&limit=1000",
    "ssh://git@github.com/a/b postgresql://gyre@db/gyre nfs://host/share user@example.com",
    "the token: expired. the password is wrong, and the secret is missing",
    "gyre join --token TOKEN http://h:1; --token NAME; --api-key $API_KEY",
    "tls_key: /etc/gyre/key.pem tls_cert=/etc/gyre/cert.pem tokenizer: /models/x key: reward_mean",
    "reward.signature: verl, sampling seed 7, secret: true, author=me, passed=5 pinned=3 pin_memory=True",
    "TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0,1 HF_HUB_OFFLINE=1 WANDB_MODE=offline",
    "RuntimeError: token 151643 is not in the vocabulary of 32000 (see tokens: 5, and token=7)",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "2026-01-01T00:00:00.123Z I forward pass: 12 ms; second pass=3; backward pass: 20 ms",
    "task-sk-learn risk-free ask-me desk-lamp-with-long-name hf_model sk_test xox key-value 1//2",
)


@pytest.mark.parametrize("text", PLAIN)
def test_the_rest_stays(text: str) -> None:
    assert shaped(text) == text
    assert Secrets().data({"message": text, "list": [text]}) == {"message": text, "list": [text]}


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "API-KEY",
        "X-Api-Key",
        "HF_TOKEN",
        "wandb_api_key",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "db.password",
        "Authorization",
        "client_secret",
        "webhook_url",
        "SENTRY_DSN",
        "private_key",
        "join_token",
        "PIN",
        "GITHUB_TOKEN2",
        "connection_string",
        "secrets",
        "--hf-token",
        "DB_PASSWORD_VALUE",
        "Cookie",
        "passphrase",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "eos_token",
        "pad_token",
        "max_tokens",
        "tokens",
        "token_id",
        "stop_token_ids",
        "tokenizer",
        "key",
        "digest",
        "signature",
        "tls_key",
        "path",
        "model_path",
        "pass_at",
        "passes",
        "max_pass",
        "author",
        "pinned",
        "seed",
        "keep_tokens",
        "tokens_per_s",
        "image_token",
        "session_id",
        "keyword",
        "monkey",
        "passenger",
        "pin_memory",
    ],
)
def test_names_that_are_of_no_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_data_is_hidden_by_the_names_of_its_keys_and_options() -> None:
    data: dict[str, Any] = {
        "sinks": [{"kind": "wandb", "options": {"settings": {"api_key": SECRET, "project": "p"}}}],
        "engine_args": ["--api-key", SECRET, "--port", "1", f"--hf-token={SECRET}"],
        "headers": {"X-Any": SECRET, "Content-Type": "application/json", "Y": "$NAME"},
        "config": {"judge": {"password": 12345678, "keys": {"private_key": [SECRET, SECRET]}}},
        "nested": json.dumps({"token": SECRET, "n": 1}),
        "numbers": {"max_token": 5, "eos_token": "</s>", "token": 7},
        "joined": {"instance": "spot-1", "token": "spot"},
    }
    shown = Secrets().data(data)
    assert SECRET not in json.dumps(shown)
    assert shown["sinks"][0]["options"]["settings"]["project"] == "p"
    assert shown["engine_args"] == ["--api-key", HIDDEN, "--port", "1", f"--hf-token={HIDDEN}"]
    assert shown["headers"] == {"X-Any": HIDDEN, "Content-Type": "application/json", "Y": "$NAME"}
    assert shown["config"]["judge"]["password"] == HIDDEN
    assert json.loads(shown["nested"]) == {"token": HIDDEN, "n": 1}
    assert shown["numbers"] == data["numbers"]
    assert shown["joined"] == data["joined"]
    found = {value for value, _ in values_in(data)}
    assert {SECRET, "12345678"} <= found
    assert "p" not in found


def test_a_value_that_is_known_is_hidden_in_every_form() -> None:
    value = 'tr0ub4dor&3 "x"/longer'
    secrets = Secrets([(value, True), ("12345", True), ("8", False), ("true", True), ("54321", False)])
    for text in (
        f"it is {value}.",
        json.dumps({"x": value}),
        "https://h/?q=" + quote(value, safe=""),
        "b64 " + base64.b64encode(value.encode()).decode(),
        "b64 " + base64.b64encode(b"user:" + value.encode()).decode(),
        "b64 " + base64.b64encode(b"u:" + value.encode() + b"\n").decode(),
    ):
        shown = secrets.text(text)
        assert value not in shown
        assert HIDDEN in shown
        assert base64.b64encode(value.encode()).decode()[4:-4] not in shown
    plain = "abcdEFGH12345678ijkl"
    secrets.learn([(plain, False)])
    broken = f"one \x1b[31m{plain[:9]}\n  {plain[9:]} two"
    assert secrets.text(broken) == f"one \x1b[31m{HIDDEN} two"
    assert secrets.text("PIN is 12345, true, 8 and 54321; 123456 v12345") == (
        f"PIN is {HIDDEN}, true, 8 and 54321; 123456 v12345"
    )


def test_values_of_the_environment_are_those_that_are_called_secrets_or_look_like_some() -> None:
    environment = {
        "WANDB_API_KEY": "x" * 20,
        "PIP_INDEX_URL": "https://me:pa55word@pypi.example",
        "HOME": "/root",
        "PWD": "/work/here",
        "LANG": "C.UTF-8",
        "TEAM_HOOK": "https://hooks.slack.com/services/T0/B0/abcdef",
        "MINE": "of mine",
        "CI_TOKEN": "none",
    }
    found = {value for value, _ in values_of_environment(environment, ["MINE"])}
    assert found == {"x" * 20, "pa55word", "services/T0/B0/abcdef", "of mine"}


@pytest.mark.parametrize(
    "text",
    [
        "A" * 4_000_000,
        "a-" * 200_000 + "b=" * 100_000 + "c:" * 100_000,
        "https://" + "a" * 200_000 + "/x" * 50_000,
        "-----BEGIN RSA PRIVATE KEY-----\n" * 20_000,
        '\\"' * 200_000,
        "--api-key " * 50_000,
        "://a:" * 50_000,
    ],
)
def test_it_ends_soon_whatever_it_reads(text: str) -> None:
    began = time.process_time()
    Secrets([("abcdefgh12345678", True)]).text(text)
    assert time.process_time() - began < 5
