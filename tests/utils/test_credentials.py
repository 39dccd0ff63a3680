import pytest

from megatron_ext.utils.credentials import is_redacted, redact, redact_tree, remove_secrets
from megatron_ext.utils.errors import UserError

SECRET = "hunter2SECRET"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"s3://KEY:{SECRET}@bucket/data", "s3://***@bucket/data"),
        (f"s3://KEY:{SECRET}/a+b/c=@bucket/data", "s3://***@bucket/data"),
        (f"https://user:{SECRET}@host:8080/data", "https://***@host:8080/data"),
        (f"https://{SECRET}@host/data", "https://***@host/data"),
        (f"https://:{SECRET}@host/data", "https://***@host/data"),
        (f"simplecache::s3://KEY:{SECRET}@bucket/data", "simplecache::s3://***@bucket/data"),
        (f"zip://a.txt::https://u:{SECRET}@host/x.zip", "zip://a.txt::https://***@host/x.zip"),
        (
            f"https://h/d?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Date=2026",
            "https://h/d?X-Amz-Credential=***&X-Amz-Signature=***&X-Amz-Date=2026",
        ),
        (f"https://a.blob.core/c?sv=2020&sig={SECRET}%3D", "https://a.blob.core/c?sv=2020&sig=***"),
        (f"https://h/d?access_token={SECRET}#t", "https://h/d?access_token=***#t"),
        (f"https://h/d?TOKEN={SECRET}", "https://h/d?TOKEN=***"),
        (f"cannot open s3://K:{SECRET}@b/x, nor https://t:{SECRET}@h/y", "cannot open s3://***@b/x, nor https://***@h/y"),
    ],
)  # fmt: skip
def test_redacted(address, shown):
    assert redact(address) == shown
    assert redact(shown) == shown
    assert is_redacted(shown)
    assert SECRET not in str(UserError("data.path", f"{address} cannot be read", "mend it"))


@pytest.mark.parametrize(
    "text",
    [
        "runs/a:b@c",
        "s3://bucket/data",
        "s3://bucket/user:name@1/data",
        "hf://datasets/user/set@main/data",
        "abfs://container@account.dfs.core.windows.net/data",
        "sftp://user@host/data",
        "http://localhost:8080/data@v1",
        "https://host/data?version=2&part=3",
        "user:password@host",
        "",
    ],
)
def test_text_without_secrets_is_unchanged(text):
    assert redact(text) == text


def test_redact_tree():
    tree = {"data": {"path": f"s3://K:{SECRET}@b", "lengths": [1, 2.5, None, True], "names": [f"https://{SECRET}@h"]}}
    clean = {"data": {"path": "s3://***@b", "lengths": [1, 2.5, None, True], "names": ["https://***@h"]}}
    assert redact_tree(tree) == clean


def test_remove_secrets_from_a_library_message():
    address = f"s3://KEY:{SECRET}@bucket/data?token=abc123"
    cleaned = remove_secrets(address, f"no /KEY:{SECRET}@bucket/data with abc123")
    assert cleaned == "no /***@bucket/data with ***"
    assert remove_secrets("sftp://user@host/x", "user unknown") == "user unknown"
