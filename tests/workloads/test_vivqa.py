"""ViVQA and a teacher's outputs in the files that their users have: read, split, checked before a session, and what is said of
broken ones; models that are fetched from a hub, and tokenizers that lie elsewhere."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import sentencepiece
import torch
from PIL import Image

from kgorch.worker.checkpoint import pretrained
from kgorch.workloads.vqa import fetch, parts, preflight
from kgorch.workloads.vqa import hub as hub_files
from kgorch.workloads.vqa.data import DataError, read_questions, split, spread, with_pictures
from kgorch.workloads.vqa.make_shapes import make_shapes
from kgorch.workloads.vqa.model import Student

TEACHER = (
    '{"img_id": "557067", "question": "màu của chiếc váy là gì", "teacher_answer": "Đen", '
    '"teacher_reasoning": "Màu sắc của chiếc váy trong hình ảnh là đen.", "reasoning_type": "DESCRIPTIVE"}',
    '{"img_id": 436394, "question": "có bao nhiêu con chó", "teacher_answer": "ba", '
    '"teacher_reasoning": "Trong ảnh có ba con chó.", "reasoning_type": "COUNTING", "reasoning_weight": 2.0, "teacher_raw": "…"}',
    '{"img_id": 436394, "question": "cái gì ở trên bàn", "teacher_answer": "máy tính", "teacher_reasoning": "", '
    '"reasoning_type": ""}',
)
CSV = (
    ",question,answer,img_id,type",
    "0,màu của chiếc váy là gì,màu đen,557067,2",
    '1,"có bao nhiêu con chó",hai,436394,1',
    "2,cái gì ở trên bàn,máy tính,436394,0",
)


@pytest.fixture
def vivqa(tmp_path: Path) -> Path:
    """As Kaggle mounts them: ViVQA-main/ViVQA-main/train.csv, drive-download-…/train/IMG_ID.jpg, teacher-checkpoint-11k."""
    for folder in (
        "vivqa/ViVQA-main/ViVQA-main",
        "vivqa/drive-download-20220309T020508Z-001/train",
        "teacher-checkpoint-11k",
    ):
        (tmp_path / folder).mkdir(parents=True)
    teacher_file(tmp_path).write_text("\n".join(TEACHER) + "\n", encoding="utf-8")
    csv_file(tmp_path).write_text("\ufeff" + "\n".join(CSV) + "\n", encoding="utf-8")
    for number in (557067, 436394):
        Image.effect_noise((64, 48), 60).convert("RGB").save(images(tmp_path) / f"{number}.jpg", quality=95)
    return tmp_path


def teacher_file(root: Path) -> Path:
    return root / "teacher-checkpoint-11k" / "teacher_outputs.jsonl"


def csv_file(root: Path) -> Path:
    return root / "vivqa/ViVQA-main/ViVQA-main/train.csv"


def images(root: Path) -> Path:
    return root / "vivqa/drive-download-20220309T020508Z-001/train"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "shapes"
    make_shapes(out, pictures=12, test=3, seed=0)
    return out


def test_teacher_outputs_are_read_as_they_are(vivqa):
    asked, broken = read_questions(teacher_file(vivqa))
    assert [(one.image, one.answer, one.kind) for one in asked] == [
        ("557067.jpg", "Đen", "DESCRIPTIVE"), ("436394.jpg", "ba", "COUNTING"), ("436394.jpg", "máy tính", "")
    ]  # fmt: skip
    assert asked[0].reason == "Màu sắc của chiếc váy trong hình ảnh là đen." and asked[2].reason == "" and not broken
    assert with_pictures(asked, images(vivqa)) == (asked, [])


def test_vivqas_csv_is_read_as_it_is_and_a_teacher_lends_it_the_reasons_for_right_answers(vivqa):
    plain, _ = read_questions(csv_file(vivqa))
    assert [(one.image, one.answer, one.reason) for one in plain] == [
        ("557067.jpg", "màu đen", ""), ("436394.jpg", "hai", ""), ("436394.jpg", "máy tính", "")
    ]  # fmt: skip
    lines = teacher_file(vivqa).read_text(encoding="utf-8").replace('"Đen"', '"Màu đen."')
    teacher_file(vivqa).write_text(lines, encoding="utf-8")
    told, _ = read_questions(csv_file(vivqa), teacher_file(vivqa))
    assert told[0].reason.startswith("Màu sắc") and told[0].answer == "màu đen"
    assert told[1].reason == "", "three dogs for two lead astray"


def test_all_questions_of_a_picture_are_on_one_side_in_whatever_order_and_number(made):
    asked, _ = read_questions(made / "teacher_outputs.jsonl")
    train, valid = split([*asked, *asked], 0.3)  # a teacher's file that was balanced by repeating its lines
    assert not {one.image for one in train} & {one.image for one in valid} and len(train) + len(valid) == 2 * len(asked)
    again = split(asked[::-1], 0.3)
    assert {one.image for one in again[1]} == {one.image for one in valid}
    with pytest.raises(DataError, match="no question is left for validation"):
        split(asked, 0.0)


def test_a_limit_takes_questions_from_all_over_the_list(made):
    asked, _ = read_questions(made / "train.csv")
    assert spread(asked, 4)[-1] == asked[-1] and len(spread(asked, 4)) == 4
    assert spread(asked, None) == spread(asked, 4000) == asked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no JSON object"),
        ('["a list"]', "is no JSON object"),
        ('{"question": "gì", "teacher_answer": "đỏ"}', "has no 'img_id'"),
        ('{"img_id": 1, "teacher_answer": "đỏ"}', "has no 'question'"),
        ('{"img_id": 1, "question": "gì", "teacher_answer": "  "}', "has no 'teacher_answer'"),
        ('{"img_id": 1, "question": "gì", "answer": "đỏ"}', "the line's fields: img_id, question, answer"),
        ('{"img_id": 1, "question": "gì", "teacher_answer": "đỏ", "teacher_reasoning": ["vì"]}', "'teacher_reasoning'"),
    ],
)
def test_a_line_that_is_broken_is_named_with_its_number_or_left_out(vivqa, line, said):
    teacher_file(vivqa).write_text("\n".join([TEACHER[0], line, TEACHER[1]]) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_questions(teacher_file(vivqa))
    assert said in str(caught.value) and "teacher_outputs.jsonl:2" in str(caught.value)
    asked, broken = read_questions(teacher_file(vivqa), skip_broken=True)
    assert len(asked) == 2 and len(broken) == 1 and said in broken[0]


def test_a_row_of_the_csv_without_its_answer_is_named(vivqa):
    csv_file(vivqa).write_text("\n".join([*CSV[:2], "1,có bao nhiêu con chó,,436394,1"]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.csv:3 has no 'answer'"):
        read_questions(csv_file(vivqa))


def test_a_listing_that_is_missing_or_empty_is_told(vivqa):
    with pytest.raises(DataError, match="make_shapes"):
        read_questions(vivqa / "gone.csv")
    teacher_file(vivqa).write_text("\n \n")
    with pytest.raises(DataError, match="no question is left"):
        read_questions(teacher_file(vivqa))


def test_pictures_that_are_missing_or_broken_are_named_or_left_out(vivqa):
    asked, _ = read_questions(teacher_file(vivqa))
    whole = (images(vivqa) / "557067.jpg").read_bytes()
    (images(vivqa) / "557067.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"557067\.jpg cannot be read"):
        with_pictures(asked, images(vivqa))
    (images(vivqa) / "557067.jpg").write_bytes(whole[: len(whole) // 2])  # its header is sound
    assert with_pictures(asked, images(vivqa))[0] == asked
    sound, broken = with_pictures(asked, images(vivqa), skip_broken=True)
    assert sound == asked[1:] and len(broken) == 1 and "557067.jpg" in broken[0]
    with pytest.raises(DataError, match="all 2 pictures are broken"):
        with_pictures(asked, vivqa, skip_broken=True)


def test_headers_are_read_once_and_remembered(vivqa, monkeypatch):
    asked, _ = read_questions(teacher_file(vivqa))
    kept, computed = dict[str, object](), []

    class Remembers:
        def cached(self, name, compute, *, key):
            if (name, str(key)) not in kept:
                computed.append(name)
                kept[name, str(key)] = compute()
            return kept[name, str(key)]

        def progress(self, *place):
            pass

    for _ in range(3):
        assert with_pictures(asked, images(vivqa), session=Remembers())[0] == asked
    assert computed == ["pictures-all"]


def args_of(root: Path, made: Path, **changes) -> dict[str, object]:
    return {
        "data": str(images(root)), "listing": str(teacher_file(root)), "students": str(made / "students"), "question_length": 12,
        "valid_share": 0.5, "epochs": 100, **changes,
    }  # fmt: skip


def test_preflight_tells_what_there_is_and_stops_without_listing_pictures_or_models(vivqa, made, tmp_path):
    said = preflight.train(**args_of(vivqa, made))
    assert "first sample read; models whole" in said and "to score on" in said
    assert preflight.predict(**args_of(vivqa, made)).startswith("3 questions about 2 pictures")
    for changes, what in (
        ({"data": str(tmp_path)}, "cannot be read"),
        ({"listing": "gone.csv"}, "gone.csv"),
        ({"students": str(tmp_path / "none")}, "image encoder is not whole"),
        ({"question_length": 65}, "question_length = 65 is more"),
    ):
        with pytest.raises(DataError, match=what):
            preflight.train(**args_of(vivqa, made, **changes))


def test_preflight_says_when_models_are_to_be_downloaded_and_there_is_no_network(vivqa, made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    with pytest.raises(DataError, match="there is no network") as caught:
        preflight.train(**args_of(vivqa, made, students=str(tmp_path / "none"), download=True))
    assert "Internet" in caught.value.next_step


def test_a_folder_with_a_tokenizer_alone_is_named_and_can_be_given_as_one(made, tmp_path):
    alone = tmp_path / "checkpoints" / "phobert_tokenizer"
    alone.mkdir(parents=True)
    for name in ("vocab.txt", "bpe.codes"):
        shutil.copy(made / "students" / "phobert-base" / name, alone)
        (made / "students" / "phobert-base" / name).rename(tmp_path / name)
    try:
        with pytest.raises(DataError) as caught:
            parts.text_encoder(alone)
        assert (
            "holds a tokenizer alone" in str(caught.value) and f'text_tokenizer = "{alone}"' in caught.value.next_step
        )
        folders = parts.Folders.of(str(made / "students"), "blip-vqa-base", "phobert-base", "vit5-base", str(alone))
        asking, _ = folders.tokenizers(12)
        assert asking("Màu của hình tròn là gì?").input_ids and parts.text_encoder(folders.models[1])
    finally:
        for name in ("vocab.txt", "bpe.codes"):
            (tmp_path / name).rename(made / "students" / "phobert-base" / name)


def test_an_answer_tokenizer_of_sentencepiece_alone_is_read(made, tmp_path, monkeypatch):
    """What `use_fast=False` saves, and the users' `vit5_tokenizer` holds."""
    texts = [
        f"{one.answer} {one.reason} [{one.kind}] {' '.join(parts.TAGS)}"
        for one in read_questions(made / "teacher_outputs.jsonl")[0]
    ]
    (tmp_path / "vit5_tokenizer").mkdir()
    with open(tmp_path / "vit5_tokenizer" / "spiece.model", "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=80, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
            character_coverage=1.0, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    (tmp_path / "vit5_tokenizer" / "tokenizer_config.json").write_text(
        '{"extra_ids": 0, "tokenizer_class": "T5Tokenizer"}\n'
    )
    tell = parts.answer_tokens(tmp_path / "vit5_tokenizer", made / "students" / "vit5-base")
    monkeypatch.setattr(parts, "is_protobuf_available", lambda: False)
    with pytest.raises(DataError, match="without protobuf"):
        parts.answer_tokens(tmp_path / "vit5_tokenizer", made / "students" / "vit5-base")
    tokens = tell("<answer>", add_special_tokens=False).input_ids + tell("đỏ", add_special_tokens=False).input_ids
    assert tell.decode(tokens).replace(" ", "") == "<answer>đỏ" and tell.unk_token_id not in tokens


def test_a_checkpoint_of_the_users_own_program_is_taken_as_starting_weights(made, tmp_path):
    """Its names: vision_encoder, text_encoder with a pooler, fusion.0 and fusion.3, decoder."""
    models = parts.Folders.of(str(made / "students"), "blip-vqa-base", "phobert-base", "vit5-base").models
    torch.manual_seed(1)
    theirs, ours = Student(*models), Student(*models)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.01)
    pooler = {
        "text_encoder.pooler.dense.weight": torch.zeros(64, 64),
        "text_encoder.pooler.dense.bias": torch.zeros(64),
    }
    torch.save(theirs.state_dict() | pooler, tmp_path / "vqa_student_best_ultimate.pt")
    facts = pretrained.load(
        {"model": ours}, tmp_path / "vqa_student_best_ultimate.pt", into=None, prefix="", strict=False
    )
    assert facts.keys() == {"file", "into", "loaded", "unexpected"} and "pooler" in facts["unexpected"]
    assert all(weight.equal(ours.state_dict()[name]) for name, weight in theirs.state_dict().items())
    assert {"fusion.0.weight", "fusion.3.weight", "decoder.shared.weight"} <= theirs.state_dict().keys()


@pytest.fixture
def hub(made) -> Iterator[str]:
    """A server that answers as the models' hub does, with the made-up students' files and some that nobody wants."""
    files = {
        part.published: made / "students" / part.published.partition("/")[2]
        for part in (parts.IMAGE, parts.TEXT, parts.DECODER)
    }

    class Hub(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.removeprefix("/api/models").partition("?")[0].strip("/").split("/")
            folder = files["/".join(path[:2])]
            if self.path.startswith("/api/models"):
                names = [*sorted(file.name for file in folder.iterdir()), "tf_model.h5", "flax_model.msgpack"]
                if path[2:3] == ["tree"]:
                    body = json.dumps([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names])
                else:
                    siblings = [{"rfilename": name} for name in names]
                    body = json.dumps({"id": "/".join(path[:2]), "sha": "1" * 40, "siblings": siblings, "private": False,
                                       "tags": [], "downloads": 0})  # fmt: skip
                content, kind = body.encode(), "application/json"
            else:
                content, kind = (folder / path[-1]).read_bytes(), "application/octet-stream"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "1" * 40)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_one_command_fetches_all_models_and_a_session_those_that_it_lacks(hub, made, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(sys, "argv", ["fetch", str(tmp_path / "students")])
    fetch.main()
    folders = parts.Folders.of(str(tmp_path / "students"), "blip-vqa-base", "phobert-base", "vit5-base")
    assert not fetch.incomplete(folders.needed) and not list((tmp_path / "students").rglob("tf_model.h5"))
    kept = (tmp_path / "students" / "vit5-base" / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "students" / "phobert-base" / "vocab.txt").unlink()
    fetch.complete(folders.needed)
    assert (tmp_path / "students" / "phobert-base" / "vocab.txt").exists()
    assert (tmp_path / "students" / "vit5-base" / "model.safetensors").stat().st_mtime_ns == kept
    (made / "students" / "phobert-base" / "bpe.codes").rename(tmp_path / "bpe.codes")  # the hub has it no longer
    (tmp_path / "students" / "phobert-base" / "bpe.codes").unlink()
    try:
        with pytest.raises(DataError, match=r"vinai/phobert-base cannot be downloaded") as caught:
            fetch.complete(folders.needed)
    finally:
        (tmp_path / "bpe.codes").rename(made / "students" / "phobert-base" / "bpe.codes")
    assert "Internet" in caught.value.next_step


def test_weights_are_taken_as_safetensors_where_they_are_published_so():
    both = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "README.md"]
    assert hub_files.wanted(both) == ["config.json", "model.safetensors"]
    assert hub_files.wanted(["bpe.codes", "pytorch_model.bin", "vocab.txt"]) == [
        "bpe.codes",
        "pytorch_model.bin",
        "vocab.txt",
    ]
