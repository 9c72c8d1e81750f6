"""The server: who gets in, what it answers, and that nothing it is sent brings it down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from tests.explorer.models import TEXT, small_explorer
from tests.explorer.serving import TOKEN
from varifocal.explorer.app import MOST_REQUEST_BYTES, make_app
from varifocal.explorer.guard import host_is_ours
from varifocal.explorer.server import make_token

BASE = f"/{TOKEN}"
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</textarea></script><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "' OR 1=1; --",
    "\u202egnp.exe \u0000\u0007 \u200b",
    "%00%0a../../../etc/passwd",
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = make_app(small_explorer("head_gated", "dense"), token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as made:
        yield made


def asked(client: TestClient, path: str = "text", **question: Any) -> Any:
    return client.post(f"{BASE}/api/{path}", json={"text": TEXT} | question)


def lives(client: TestClient) -> bool:
    return bool(asked(client).status_code == 200)


# Who gets in.


@pytest.mark.parametrize("path", ["/", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", "//", "/static/page.css", "/docs"])
def test_address_without_the_token_is_refused(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 403


def test_questions_without_the_token_are_refused(client: TestClient) -> None:
    assert client.post("/api/text", json={"text": TEXT}).status_code == 403
    assert client.post("/wrong-token/api/text", json={"text": TEXT}).status_code == 403


def test_address_with_the_token_shows_the_page(client: TestClient) -> None:
    page = client.get(f"{BASE}/")
    assert page.status_code == 200
    assert '<h2 id="name-0">head_gated</h2>' in page.text


def test_address_without_its_last_slash_leads_to_the_page(client: TestClient) -> None:
    assert str(client.get(BASE).url).endswith(f"{BASE}/")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1:8765", ""])
def test_foreign_host_header_is_refused(client: TestClient, host: str) -> None:
    assert client.get(f"{BASE}/", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "localhost", "[::1]:8765", "LOCALHOST"])
def test_loopback_host_header_is_let_in(client: TestClient, host: str) -> None:
    assert client.get(f"{BASE}/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("header", "host", "ours"),
    [
        ("192.168.1.7:8765", "0.0.0.0", True),
        ("192.168.1.7:8765", "127.0.0.1", False),
        ("lab:8765", "lab", True),
        ("evil.example:8765", "0.0.0.0", False),
        ("[fe80::1]:8765", "::", True),
    ],
)
def test_server_beyond_loopback_answers_under_its_name_and_numbers(header: str, host: str, ours: bool) -> None:
    assert host_is_ours(header, host) is ours


@pytest.mark.parametrize("path", ["/", f"{BASE}/", f"{BASE}/static/page.js", f"{BASE}/api/start"])
def test_every_answer_tells_the_browser_to_load_nothing_else(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_page_holds_no_inline_script_and_no_foreign_address(client: TestClient) -> None:
    page = client.get(f"{BASE}/").text
    assert '<script type="module" src="static/page.js"></script>' in page
    assert page.count("<script") == 1
    assert "http:" not in page
    assert "https:" not in page
    assert "style=" not in page


def test_files_outside_static_are_not_served(client: TestClient) -> None:
    for path in ("static/../app.py", "static/%2e%2e/app.py", "static/..%2fapp.py", "templates/page.html"):
        assert client.get(f"{BASE}/{path}").status_code in (403, 404)


def test_token_is_random_and_long() -> None:
    assert make_token() != make_token()
    assert len(make_token()) >= 32


@pytest.mark.parametrize("given", ["short", "with spaces in the middle", "../../../../../../x"])
def test_unfit_token_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="a token needs at least 16 letters"):
        make_token(given)


# What it answers.


def test_text_is_answered_with_a_number_for_each_token(client: TestClient) -> None:
    view = asked(client, layer=1, head=3).json()
    assert "".join(view["pieces"]) == TEXT
    assert len(view["gate"]) == len(view["decides"]) == len(view["pieces"])


def test_token_is_answered_with_its_keys_what_comes_next_and_what_it_reads_far_back(client: TestClient) -> None:
    view = asked(client, "token", token=12).json()
    assert len(view["weights"]) == 13
    assert sum(view["weights"]) == pytest.approx(1, abs=2e-3)
    for gates in ("learned", "local", "global"):
        state = asked(client, "next", token=12, gates=gates).json()
        assert state["gates"] == gates
        assert len(state["candidates"]) == 10
    shares = asked(client, "far", token=12).json()["shares"]
    assert all(0 <= share <= 1 for layer in shares for share in layer)
    assert asked(client, "far", token=10_000).status_code == 422


def test_second_model_answers_for_itself(client: TestClient) -> None:
    assert asked(client, model=1).json()["gate"] is None


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_as_it_was(client: TestClient, text: str) -> None:
    answer = asked(client, text=text)
    assert answer.status_code == 200
    assert "".join(answer.json()["pieces"]) == text
    assert answer.headers["content-type"] == "application/json"


# What it refuses.


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ({"layer": 2}, "there is no layer 2; head_gated has 2, counted from 0"),
        ({"head": 4}, "there is no head 4; head_gated has 4, counted from 0"),
        ({"model": 2}, "there is no model 2; this page has 2, counted from 0"),
        ({"layer": -1}, "layer: Input should be greater than or equal to 0"),
        ({"gates": "open"}, "gates: Input should be 'learned', 'local' or 'global'"),
        ({"gates": "local", "model": 1}, "dense has no gates that could be held"),
        ({"layer": "1"}, "layer: Input should be a valid integer"),
        ({"layer": 1e300}, "layer: Input should be a valid integer"),
        ({"text": 5}, "text: Input should be a valid string"),
        ({"text": ""}, "the text is empty"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
    ],
)
def test_wrong_question_is_answered_with_a_sentence(client: TestClient, question: Any, sentence: str) -> None:
    answer = asked(client, **question)
    assert answer.status_code == 422
    assert sentence in answer.json()["detail"]
    assert lives(client)


def test_token_after_the_text_is_refused(client: TestClient) -> None:
    answer = asked(client, "token", token=10**9)
    assert answer.status_code == 422
    assert "there is no token 1000000000" in answer.json()["detail"]


def test_text_longer_than_the_context_is_refused_with_its_count(client: TestClient) -> None:
    answer = asked(client, text="0" * 300)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "the text has 300 tokens, but head_gated reads at most 256; shorten it by 44"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": "a", "text', b"NaN"],
    ids=["empty", "cut", "null", "list", "bytes", "surrogate", "deep", "half", "nan"],
)
def test_malformed_request_is_refused_and_the_server_lives_on(client: TestClient, body: bytes) -> None:
    assert client.post(f"{BASE}/api/text", content=body).status_code == 422
    assert lives(client)


def test_oversized_request_is_refused_and_the_server_lives_on(client: TestClient) -> None:
    body = json.dumps({"text": "a" * MOST_REQUEST_BYTES})
    assert client.post(f"{BASE}/api/text", content=body).status_code == 413
    assert lives(client)


def test_oversized_request_of_unknown_length_is_refused(client: TestClient) -> None:
    chunks = (b"a" * 65536 for _ in range(MOST_REQUEST_BYTES // 65536 + 2))
    assert client.post(f"{BASE}/api/text", content=chunks).status_code == 413
    assert lives(client)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    assert client.request(method, f"{BASE}/api/text").status_code == 405


def test_failing_model_answers_500_and_the_server_lives_on() -> None:
    explorer = small_explorer("dense")
    model = explorer.opened[0].model.model
    whole, model.norm = model.norm, torch.nn.LayerNorm(3)
    with TestClient(make_app(explorer, token=TOKEN), base_url="http://localhost", raise_server_exceptions=False) as own:
        answer = asked(own)
        assert answer.status_code == 500
        assert answer.json() == {"detail": "the model failed: RuntimeError"}
        model.norm = whole
        assert lives(own)
