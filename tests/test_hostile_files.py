"""Files that are damaged, foreign or made to harm: each gives one sentence, and nothing is read, run or filled by them.

A case is a row of CASES: what is good (a key of GOOD), what is done to it, and what the sentence must say.
"""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.data.texts import made_texts, write_jsonl
from tests.explorer.models import opened_model, save_model, small_tokenizer
from tests.retrofit.test_families import save_family, write_gguf
from tests.training.runs import small_config
from varifocal.data import open_data
from varifocal.data.manifest import NAME, digest
from varifocal.data.prepare import Options, prepare
from varifocal.data.prepare import Progress as Preparing
from varifocal.data.probe import Probe, make_probe
from varifocal.data.tokenizers import find_tokenizer
from varifocal.results.comparison import PlanRecord, cell_folder, cell_name
from varifocal.retrofit import load_pretrained
from varifocal.retrofit.opening import open_with_tokenizer
from varifocal.retrofit.sources import read_tokenizer
from varifocal.training.config import load_config
from varifocal.training.run import train
from varifocal.training.trainer import Progress

PROBE = Probe(length=64, questions=2, distances=(4, 32), keys=8, values=4, noise=16)
DEEP = "[" * 100_000


# What is good.


def make_model(folder: Path) -> None:
    save_model(folder)


def make_sharded(folder: Path) -> None:
    opened = opened_model("head_gated")
    opened.model.save_pretrained(folder, max_shard_size="20KB")
    opened.tokenizer.save_pretrained(folder)


def use_model(folder: Path) -> None:
    model, tokenizer = open_with_tokenizer(folder)
    model(torch.tensor([tokenizer.encode("the bridge")]))


def make_qwen(folder: Path) -> None:
    save_family("Qwen3", folder)
    small_tokenizer().save_pretrained(folder)


def use_pretrained(folder: Path) -> None:
    load_pretrained(folder)
    read_tokenizer(folder)


def make_gguf(folder: Path, change: Callable[[gguf.GGUFWriter], object] = lambda writer: None, **more: Any) -> None:
    """A model of Qwen3 with a small vocabulary; `change` adds to its header."""
    model = save_family("Qwen3", folder / "source")
    shutil.rmtree(folder / "source")

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        letters = [*"abcdefghijklmnopqrstuvwxyz", "ab"]
        tokens = [*letters, *(f"<{number}>" for number in range(model.config.vocab_size - len(letters)))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_merges(more.get("merges", ["a b"]))
        change(writer)

    write_gguf(model, folder / "model.gguf", header=add_tokenizer, **more)


def use_gguf(folder: Path) -> None:
    use_pretrained(folder / "model.gguf")


def make_data(folder: Path) -> None:
    shutil.rmtree(folder)
    make_probe(folder, PROBE, texts=40)


def use_data(folder: Path) -> None:
    data = open_data(folder, verify="full")
    data.tokenizer()
    for name in ("train", "validation"):
        rows = data.split(name).rows(length=64)
        rows.batch(range(len(rows)))
        rows.answers(range(len(rows)))


def make_run(folder: Path) -> None:
    """A run that somebody stopped after step 4, with its data beside it."""
    data = make_probe(folder / "data", PROBE, texts=100)
    config = small_config(data, optimization={"steps": 6}, validation={"every": 2})
    (folder / "config.toml").write_text(config.as_toml(), encoding="utf-8")

    def interrupt(now: Progress) -> None:
        if now.step == 4 and now.loss is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder / "run", on_progress=interrupt)


def use_run(folder: Path) -> None:
    train(load_config(folder / "config.toml", [f"data.path={folder / 'data'}"]), folder / "run", resume=True)


def make_preparation(folder: Path) -> None:
    """A preparation that was interrupted when all its pieces were done."""
    (folder / "source").mkdir()
    write_jsonl(folder / "source" / "texts.jsonl", made_texts(30))

    def interrupt(now: Preparing) -> None:
        if now.doing == "writing the manifest":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_preparation(folder, interrupt)


def use_preparation(folder: Path, on_progress: Callable[[Preparing], None] | None = None) -> None:
    options = Options(tokenizer="bytes")
    prepare(str(folder / "source"), folder / "out", options=options, workers=1, on_progress=on_progress)


def make_comparison(folder: Path) -> None:
    arms = [{"name": "dense", "mechanism": "dense"}]
    plan = {"title": "x", "arms": arms, "seeds": [0], "baseline": "dense", "data": "x", "workers": 1}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def use_comparison(folder: Path) -> None:
    plan = PlanRecord.read(folder / "plan.json")
    assert not [arm for arm in plan.arms if cell_folder(folder, cell_name(arm.name, 0)).exists()]


GOOD: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "model": (make_model, use_model),
    "sharded": (make_sharded, use_model),
    "qwen": (make_qwen, use_pretrained),
    "gguf": (make_gguf, use_gguf),
    "data": (make_data, use_data),
    "run": (make_run, use_run),
    "preparation": (make_preparation, use_preparation),
    "comparison": (make_comparison, use_comparison),
    "tokenizer": (
        lambda folder: small_tokenizer().save_pretrained(folder),
        lambda folder: find_tokenizer(str(folder), end_token="a"),
    ),
}
"""By name: how it is made in a folder, and what a user does with it."""


# What is done to it.


def text(name: str, content: str) -> Callable[[Path], object]:
    """Another content of a file."""
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def edited(name: str, **changes: Any) -> Callable[[Path], object]:
    """Other values of a JSON file; `a__b` is b in a."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        for key, value in changes.items():
            *outer, last = key.split("__")
            place = content
            for part in outer:
                place = place[part]
            place[last] = value
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return spoil


def config(**changes: Any) -> Callable[[Path], object]:
    return edited("config.json", **changes)


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """A manifest of the attacker's making: its checksum is right."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        del content["checksum"], content["fingerprint"]
        change(content)
        (folder / NAME).write_text(json.dumps(content | {"checksum": digest(content)}), encoding="utf-8")

    return spoil


def without(name: str) -> Callable[[Path], object]:
    return manifest(lambda found: found.pop(name))


def moved_shard(name: str) -> Callable[[dict[str, Any]], object]:
    """The first shard under another name, consistently."""

    def change(content: dict[str, Any]) -> None:
        shard = content["splits"]["train"]["shards"][0]
        for old in [file for file in content["files"] if file.startswith(shard["name"])]:
            content["files"][old.replace(shard["name"], name)] = content["files"].pop(old)
        shard["name"] = name

    return change


def rewritten(name: str, change: Callable[[Any], object], kind: str) -> Callable[[Path], object]:
    """Another content of a file of numbers in a data set, with checksums that fit."""

    def spoil(folder: Path) -> None:
        from varifocal.data.checksums import file_checksums

        numbers = numpy.fromfile(folder / name, dtype=kind)
        change(numbers)
        numbers.tofile(folder / name)
        manifest(lambda found: found["files"][name].update(checksums=file_checksums(folder / name)))(folder)

    return spoil


def pickled(name: str) -> Callable[[Path], object]:
    """The weights as pickle, under that name, and no others."""

    def spoil(folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()

    return spoil


def index_of(name: str) -> Callable[[Path], object]:
    """All tensors of an index in one file of that name, which exists."""

    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = {}
        for part in sorted(set(content["weight_map"].values())):
            tensors |= load_file(folder / part)
            (folder / part).unlink()
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        save_file(tensors, target, {"format": "pt"}) if name.endswith(".safetensors") else torch.save(tensors, target)
        content["weight_map"] = dict.fromkeys(content["weight_map"], name)
        file.write_text(json.dumps(content), encoding="utf-8")

    return spoil


def header(change: Callable[[gguf.GGUFWriter], object], **more: Any) -> Callable[[Path], object]:
    """A GGUF file with another header."""

    def spoil(folder: Path) -> None:
        (folder / "model.gguf").unlink()
        make_gguf(folder, change, **more)

    return spoil


def traces(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "run" / "gates.npz").write_bytes(content)


def npz(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return written.getvalue()


def array(shape: tuple[int, ...], kind: str = "<i8", content: bytes = b"") -> bytes:
    """The head of a .npy file of that shape, whatever follows it."""
    written = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(written, {"descr": kind, "fortran_order": False, "shape": shape})
    return written.getvalue() + content


def damaged_npz(folder: Path) -> None:
    """Bits flipped in the middle of the compressed content."""
    content = bytearray((folder / "run" / "gates.npz").read_bytes())
    for place in range(60, 120):
        content[place] ^= 0x5A
    (folder / "run" / "gates.npz").write_bytes(content)


def sealed(name: str) -> Callable[[Path], object]:
    """The newest checkpoints name a file elsewhere."""

    def spoil(folder: Path) -> None:
        for seal in (folder / "run" / "checkpoints").glob("step-*/complete.json"):
            content = json.loads(seal.read_text(encoding="utf-8"))
            content["files"][name] = {"size": 0, "checksums": ""}
            seal.write_text(json.dumps(content), encoding="utf-8")

    return spoil


class Case(NamedTuple):
    """A row of the table."""

    good: str
    spoil: Callable[[Path], object]
    sentence: str
    """A regular expression."""


STEP = npz({"step.npy": array((3,), content=bytes(24))})
PLAIN_ENTRY, ENCRYPTED_ENTRY = (b"PK\x01\x02\x14\x03\x14\x00" + flag + b"\x00" for flag in (b"\x00", b"\x01"))
OUT = "is not inside"
INDEX = "model.safetensors.index.json"
PLAN = "out/preparation/plan.json"
SPAN = {"path": "texts.jsonl", "kind": "jsonl", "begin": 0, "end": None, "weight": 1}
ARM = {"name": "dense", "mechanism": "dense"}
CASES: dict[str, Case] = {
    # Files that name others.
    "tokenizer above": Case("data", manifest(lambda m: m["tokenizer"].update(file="../../secret")), OUT),
    "tokenizer elsewhere": Case("data", manifest(lambda m: m["tokenizer"].update(file="/etc/passwd")), OUT),
    "tokenizer without checksums": Case(
        "data", manifest(lambda m: m["tokenizer"].update(file=NAME)), "has no checksums of the file 'manifest.json'"
    ),
    "shard above": Case("data", manifest(moved_shard("../train/00000.ds")), OUT),
    "shard elsewhere": Case("data", manifest(moved_shard("/dev/zero")), OUT),
    "shard with a null": Case("data", manifest(moved_shard("a\0b")), OUT),
    "shard without a name": Case("data", manifest(moved_shard("")), OUT),
    "checkpoint with a file above": Case("run", sealed("../../../secret"), f"none of the 1 checkpoints .*{OUT}"),
    "checkpoint with a device": Case("run", sealed("/dev/zero"), f"none of the 1 checkpoints .*{OUT}"),
    "weights above": Case("sharded", index_of("../weights.safetensors"), OUT),
    "weights elsewhere": Case("sharded", edited(INDEX, weight_map={"a": "/x.safetensors"}), OUT),
    "weights by number": Case("sharded", edited(INDEX, weight_map={"a": 3}), OUT),
    "weights named by the config": Case(
        "model", config(transformers_weights="../x.safetensors"), "names the weights '../x.safetensors'"
    ),
    "qwen's weights named by the config": Case(
        "qwen", config(transformers_weights="adapter_model.bin"), "names the weights 'adapter_model.bin'"
    ),
    "plan of a preparation with another file": Case(
        "preparation", edited(PLAN, pieces=[[SPAN | {"path": "../../secret"}]]), "which is not of the source"
    ),
    "plan of a preparation of another kind": Case("preparation", edited(PLAN, pieces=[[3]]), "is not the plan"),
    "plan of a preparation with a text for a number": Case(
        "preparation", edited(PLAN, pieces=[[SPAN | {"begin": "x"}]]), "is not the plan"
    ),
    "deep plan of a preparation": Case("preparation", text(PLAN, DEEP), "is not the plan"),
    "comparison with a run elsewhere": Case("comparison", edited("plan.json", arms=[ARM | {"name": "/etc"}]), OUT),
    "comparison with a run above": Case("comparison", edited("plan.json", arms=[ARM | {"name": "../.."}]), OUT),
    "deep plan of a comparison": Case("comparison", text("plan.json", DEEP), "nested too deeply"),
    # Pickle.
    "pickle": Case("model", pickled("pytorch_model.bin"), r"only as pickle \(pytorch_model.bin\)"),
    "pickle of another name": Case("model", pickled("weights.pth"), r"only as pickle \(weights.pth\)"),
    "qwen's pickle": Case("qwen", pickled("pytorch_model.bin"), r"only as pickle \(pytorch_model.bin\)"),
    "pickle in an index": Case(
        "sharded", index_of("part.bin"), "names the file 'part.bin'; only .safetensors are read"
    ),
    "index of pickles": Case(
        "sharded",
        lambda folder: (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json"),
        "there is no file named model.safetensors",
    ),
    "part that is missing": Case(
        "sharded", lambda folder: next(folder.glob("model-*.safetensors")).unlink(), "which is missing"
    ),
    "index that is a list": Case("sharded", text(INDEX, "[]"), "is not an index of weights"),
    "deep index": Case("sharded", text(INDEX, DEEP), "nested too deeply"),
    "adapter": Case("model", text("adapter_config.json", "{}"), "holds an adapter"),
    "distributed parts": Case(
        "model", text("shard-00000-model-00000-of-00001.safetensors", ""), "parts of a distributed checkpoint"
    ),
    # Sizes.
    "layers without end": Case("model", config(num_hidden_layers=10**30), "between 1 and 10000, got 1000"),
    "ten million layers": Case("model", config(num_hidden_layers=10**7), "between 1 and 10000, got 10000000"),
    "more layers than weights": Case("model", config(num_hidden_layers=9999), "hold 2 layers, the config has 9999"),
    "negative layers": Case("model", config(num_hidden_layers=-1), "between 1 and 10000, got -1"),
    "width without end": Case("model", config(hidden_size=10**30), "hidden_size must be between 1 and"),
    "width that the weights do not have": Case("model", config(intermediate_size=1 << 24), "bytes cannot hold"),
    "vocabulary that the weights do not have": Case("model", config(vocab_size=1 << 31), "bytes cannot hold"),
    "heads without end": Case("model", config(num_attention_heads=10**30), "num_attention_heads must be between 1 and"),
    "window without end": Case("model", config(mechanism_options={"window": 10**30}), "'window' must lie within"),
    "context without end": Case("model", config(max_position_embeddings=10**30), "must be between 1 and"),
    "qwen's layers": Case("qwen", config(num_hidden_layers=10**30), "between 1 and 10000, got 1000"),
    "qwen's layers that are not there": Case("qwen", config(num_hidden_layers=5000, layer_types=None), "hold 2 layers"),
    "qwen's width": Case("qwen", config(intermediate_size=1 << 24), "bytes cannot hold"),
    "gguf's layers": Case(
        "gguf", header(lambda w: w.add_block_count(4 * 10**9)), "between 1 and 10000, got 4000000000"
    ),
    "gguf's layers that are not there": Case("gguf", header(lambda w: w.add_block_count(5000)), "hold 2 layers"),
    "gguf's width": Case("gguf", header(lambda w: w.add_feed_forward_length(1 << 24)), "bytes cannot hold"),
    # Configs of models.
    "unknown dtype": Case("model", config(dtype="float7"), "unknown dtype 'float7'; known are float64"),
    "dtype of the wrong kind": Case("model", config(dtype=[1]), "unknown dtype"),
    "qwen's unknown dtype": Case("qwen", config(dtype="float7"), "cannot be read"),
    "pad id beyond the vocabulary": Case("model", config(pad_token_id=10**6), "pad_token_id must be below"),
    "pad id without end": Case("model", config(pad_token_id=10**30), "pad_token_id must be below"),
    "qwen's pad id": Case("qwen", config(pad_token_id=10**6), "cannot be read"),
    "deep config": Case("model", text("config.json", DEEP), "nested too deeply"),
    "deep value in a config": Case("model", text("config.json", '{"a":' * 50_000), "nested too deeply"),
    "qwen's deep config": Case("qwen", text("config.json", DEEP), "nested too deeply"),
    "rope of the wrong kind": Case("model", config(rope_parameters="x"), "cannot be read"),
    "unknown activation": Case("model", config(hidden_act="explode"), "cannot be read"),
    "activation that is a call": Case("model", config(hidden_act={"__class__": 1}), "cannot be read"),

    "code of the attacker": Case("qwen", config(model_type="mine", auto_map={"AutoConfig": "code.Config"}), "cannot"),
    # Tokenizers.
    "empty tokenizer": Case("model", text("tokenizer.json", "{}"), "the tokenizer in .* cannot be read"),
    "deep tokenizer": Case("model", text("tokenizer.json", DEEP), "the tokenizer in .* cannot be read"),
    "list for a tokenizer's config": Case("model", text("tokenizer_config.json", "[]"), "the tokenizer in .* cannot"),
    "qwen's tokenizer": Case("qwen", text("tokenizer.json", '{"model": 3}'), "the tokenizer of .* cannot be read"),
    "tokenizer of nothing": Case(
        "tokenizer", text("tokenizer.json", "null"), "is not a tokenizer.json that can be read"
    ),
    "deep tokenizer of a user": Case("tokenizer", text("tokenizer.json", DEEP), "not a tokenizer.json that can be"),
    # GGUF.
    "merges that are no pairs": Case("gguf", header(lambda w: None, merges=["abc"]), "the tokenizer of .* cannot be"),
    "merges of unknown tokens": Case("gguf", header(lambda w: None, merges=["x y"]), "the tokenizer of .* cannot be"),
    "no heads": Case("gguf", header(lambda w: w.add_head_count(0)), "num_attention_heads must be between 1 and"),
    "tensor of another size": Case("gguf", header(lambda w: w.add_embedding_length(48)), "should have|cannot be read"),
    # Manifests of data sets.
    "manifest of nothing": Case("data", manifest(lambda m: m.clear()), "is not the manifest"),
    "deep manifest": Case("data", text(NAME, DEEP), "truncated or altered"),
    **{
        f"manifest without {name}": Case("data", without(name), f"{name}.*(missing|must be)")
        for name in ("kind", "source", "tokenizer", "splits", "files", "skipped", "versions")
    },
    "list for splits": Case("data", manifest(lambda m: m.update(splits=[])), "'splits' must be of the kind dict"),
    "split without shards": Case("data", manifest(lambda m: m["splits"].update(train={})), "'shards' is missing"),
    "text for a shard": Case(
        "data", manifest(lambda m: m["splits"]["train"].update(shards=["x"])), "must be an object"
    ),
    "negative size": Case(
        "data", manifest(lambda m: m["files"]["tokenizer.json"].update(size=-1)), "at least 0, got -1"
    ),
    "text for a size": Case(
        "data", manifest(lambda m: m["files"]["tokenizer.json"].update(size="9")), "of the kind int"
    ),
    "checksums that are none": Case(
        "data", manifest(lambda m: m["files"]["tokenizer.json"].update(checksums="zz")), "are not hexadecimal"
    ),
    "unknown key of a shard": Case(
        "data", manifest(lambda m: m["splits"]["train"]["shards"][0].update(more=1)), "unknown key 'more'"
    ),
    "tokens of three bytes": Case("data", manifest(lambda m: m.update(token_bytes=3)), "must be 2 or 4, got 3"),
    "vocabulary beyond its tokens": Case(
        "data", manifest(lambda m: m["tokenizer"].update(vocabulary=10**30)), "do not fit together"
    ),
    "probe without values": Case("data", manifest(lambda m: m["source"].update(values=0)), "expected 2 or more"),
    "source of another kind": Case("data", manifest(lambda m: m["source"].update(source=3)), "do not fit together"),
    "token beyond the vocabulary": Case(
        "data", rewritten("train/00000.ds", lambda tokens: tokens.fill(60_000), "<u2"), "holds the token 60000"
    ),
    "index that goes back": Case(
        "data", rewritten("train/00000.ds.index", lambda ends: ends.__setitem__(1, 0), "<u8"), "does not ascend"
    ),
    "index beyond all measure": Case(
        "data", rewritten("train/00000.ds.index", lambda ends: ends.__setitem__(1, 2**63 + 5), "<u8"), "not ascend"
    ),
    "answer after the end": Case(
        "data", rewritten("train/00000.ds.answers", lambda found: found.__setitem__(-2, 10**9), "<i8"), "the answers"
    ),
    # Traces of gates.
    "damaged traces": Case("run", damaged_npz, r"cannot read .*gates.npz"),
    "text for traces": Case("run", traces(b"nothing"), r"cannot read .*gates.npz"),
    "one array for traces": Case("run", traces(array((3,), content=bytes(24))), r"cannot read .*gates.npz"),
    "traces of pickles": Case(
        "run", traces(npz({"step.npy": array((1,), "|O", b"x" * 99)})), r"cannot read .*gates.npz"
    ),
    "traces without end": Case("run", traces(npz({"step.npy": array((10**15,))})), r"cannot read .*gates.npz"),
    "traces that unpack to a gigabyte": Case(
        "run", traces(npz({"step.npy": array((1 << 27,), content=bytes(1 << 30))})), "unpack to"
    ),
    "traces of other shapes": Case("run", traces(STEP), "holds the traces of another model"),
    "traces of text": Case("run", traces(npz({"step.npy": array((1,), "<U1", b"abcd")})), r"cannot read .*gates.npz"),
    "encrypted traces": Case(
        "run", traces(npz({"step.npy": array((1,))}).replace(PLAIN_ENTRY, ENCRYPTED_ENTRY)), r"cannot read .*gates.npz"
    ),
    "deep config of a run": Case("run", text("run/config.toml", f"a = {DEEP}"), "nested too deeply"),
    "deep config for a run": Case("run", text("config.toml", f"a = {DEEP}"), "nested too deeply"),
    "number of ten thousand digits": Case("run", text("config.toml", f"a = {'9' * 10_000}"), "is not TOML"),
    "deep seal": Case(
        "run",
        lambda folder: [
            seal.write_text(DEEP) for seal in (folder / "run" / "checkpoints").glob("step-*/complete.json")
        ],
        "none of the 1 checkpoints .* nested too deeply",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What is good, made once."""
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name) / name
            known[name].mkdir()
            GOOD[name][0](known[name])
        return known[name]

    return make


@pytest.mark.parametrize("name", GOOD)
def test_what_is_good_can_be_used(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    GOOD[name][1](Path(shutil.copytree(made(name), tmp_path / "good")))


@pytest.mark.parametrize("name", CASES)
def test_hostile_file_is_refused_in_one_sentence(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    case = CASES[name]
    folder = Path(shutil.copytree(made(case.good), tmp_path / "hostile"))
    case.spoil(folder)
    with pytest.raises(ValueError, match=case.sentence) as refused:
        GOOD[case.good][1](folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
