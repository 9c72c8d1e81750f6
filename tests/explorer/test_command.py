"""varifocal explore: what it opens, and how it says no."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.explorer.models import TEXT, VOCABULARY, save_model, small_tokenizer
from tests.explorer.serving import Server
from varifocal.cli.explore import explore
from varifocal.explorer.explorer import Explorer
from varifocal.explorer.opening import open_model
from varifocal.explorer.views import TokenQuestion

PROGRAM = "from varifocal.cli.main import run; run()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a run leaves it."""
    return save_model(tmp_path_factory.mktemp("run") / "model")


def test_command_serves_the_page_under_the_address_that_it_prints(model: Path) -> None:
    command = [sys.executable, "-u", "-c", PROGRAM, "explore", str(model), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=60) as answer:
            page = answer.read().decode()
        question = urllib.request.Request(f"{address}api/text", json.dumps({"text": TEXT}).encode())
        with urllib.request.urlopen(question, timeout=60) as answer:
            view = json.load(answer)
        process.terminate()
        complaints = process.stderr.read()
    assert f">{model.parent.name}</h2>" in page
    assert "".join(view["pieces"]) == TEXT
    assert complaints == ""


SLOW = """
import time
from tests.explorer.models import small_explorer
from varifocal.explorer.server import make_token, serve

explorer = small_explorer("dense")


def text(asked, waiting):
    # A model that takes for ever: each of its layers asks whether somebody still waits.
    print("asked", flush=True)
    while True:
        waiting.require()
        time.sleep(0.01)


explorer.text = text
serve(explorer, host="127.0.0.1", port=0, token=make_token(), on_ready=lambda address: print(address, flush=True))
"""


def test_server_ends_without_a_trace_while_it_computes() -> None:
    command = [sys.executable, "-u", "-c", SLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        question = urllib.request.Request(f"{address}api/text", json.dumps({"text": TEXT}).encode())
        answers: list[int] = []

        def ask() -> None:
            try:
                urllib.request.urlopen(question, timeout=60)
            except urllib.error.HTTPError as error:
                answers.append(error.code)

        asking = threading.Thread(target=ask)
        asking.start()
        assert process.stdout.readline() == "asked\n"
        process.terminate()
        complaints = process.stderr.read()
        asking.join()
    assert complaints == ""
    assert answers == [499]


def test_folder_of_a_run_opens_its_model(model: Path) -> None:
    assert open_model(str(model.parent)).name == model.parent.name


def test_checkpoint_of_qwen3_is_shown_with_dense_attention(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    explorer = Explorer([open_model(str(tmp_path))])
    assert explorer.models[0].layers[0].mechanism == "dense"
    assert len(explorer.token(TokenQuestion(text=TEXT, token=9)).weights) == 10


def test_longer_texts_can_be_asked_for(model: Path) -> None:
    explorer = Explorer([open_model(str(model))], most_tokens=1000)
    assert explorer.models[0].most == 1000
    assert explorer.text(TokenQuestion(text="0" * 300, token=0)).beyond


def test_taken_port_is_said_to_be_taken(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Address already in use; choose others with --host and --port"):
            explore(str(model), port=taken.getsockname()[1], browser=False)


def test_model_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with pytest.raises(ValueError, match="holds no tokenizer"):
        open_model(str(tmp_path))


def test_address_of_the_page_is_answered_while_a_long_text_is_read(model: Path) -> None:
    with Server(Explorer([open_model(str(model))], most_tokens=20_000)) as server:
        body = json.dumps({"text": "town " * 3000}).encode()
        question = urllib.request.Request(f"{server.address}api/text", body)
        reading = threading.Thread(target=lambda: urllib.request.urlopen(question, timeout=300).read())
        reading.start()
        with urllib.request.urlopen(f"{server.address}api/start", timeout=60) as answer:
            assert answer.status == 200
        reading.join(timeout=300)
        assert not reading.is_alive()


def test_what_nobody_waits_for_is_not_computed(model: Path) -> None:
    explorer = Explorer([open_model(str(model))])
    ran: list[int] = []
    began, go = threading.Event(), threading.Event()

    def note(number: int) -> None:
        ran.append(number)
        began.set()
        assert go.wait(300)

    for number, layer in enumerate(explorer.opened[0].model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: note(number))
    with Server(explorer) as server:
        first, second = (asking(server, text) for text in ("The council met.", "The bridge was built."))
        assert began.wait(300)
        first.close()
        second.close()
        # The server learns of the end of a connection before it answers who comes later.
        for _ in range(2):
            urllib.request.urlopen(f"{server.address}api/start", timeout=300).read()
        go.set()
        question = urllib.request.Request(f"{server.address}api/text", json.dumps({"text": TEXT}).encode())
        with urllib.request.urlopen(question, timeout=300) as answer:
            assert answer.status == 200
    # The first layer of the question that was under way, and all layers of the one that was answered.
    assert ran == [0, 0, 1]


def asking(server: Server, text: str) -> socket.socket:
    """A connection with a question on it whose answer nobody has read."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    body = json.dumps({"text": text}).encode()
    path = server.address.partition(str(server.port))[2]
    head = f"POST {path}api/text HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_missing_model_is_said_to_be_missing() -> None:
    with pytest.raises(ValueError, match="no/such/folder/at/all does not exist; expected a folder with safetensors"):
        explore("no/such/folder/at/all", browser=False)


def test_unfit_token_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="a token needs at least 16 letters, digits, - or _, got 5 characters"):
        explore("no/such/folder/at/all", token="short", browser=False)


def test_unknown_host_is_said_to_be_unknown(model: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot listen on no\.such\.host\.invalid"):
        explore(str(model), host="no.such.host.invalid", browser=False)


def test_listening_beyond_this_machine_gives_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        explore("no/such/folder/at/all", host="0.0.0.0", browser=False)
    assert "warning: listening on 0.0.0.0" in capsys.readouterr().err
