"""The student for questions about pictures: listings, curriculum, folders, network, scores, and what is said of broken ones."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BlipConfig, BlipForQuestionAnswering, RobertaForMaskedLM

from orchestrator.plan import parse
from workloads.vqa import parts, predict, train
from workloads.vqa.curriculum import ANSWER_FOCUS, FORMAT_LEARNING, FULL_REASONING, PHASES, answer_in, phase_at
from workloads.vqa.data import DataError, Questions, Sample
from workloads.vqa.make_shapes import make_shapes
from workloads.vqa.model import Student, token_loss
from workloads.vqa.predict import side_by_side
from workloads.vqa.scores import exact, normalised, token_f1

QUESTION, ANSWER, SIZE = 12, 28, 32


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "shapes"
    make_shapes(out, pictures=12, valid=3, seed=0)
    return out


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "shapes")
    return tmp_path / "shapes"


def questions(root: Path, part="train", **changes) -> Questions:
    ask = parts.question_tokens(root / "students" / "phobert", QUESTION)
    tell = parts.answer_tokens(root / "students" / "vit5")
    settings = {"size": SIZE, "question_length": QUESTION, "answer_length": ANSWER, **changes}
    return Questions(root, part, ask, tell, **settings)


def student(root: Path, **changes) -> Student:
    torch.manual_seed(0)
    return Student(*(str(root / "students" / name) for name in ("blip", "phobert", "vit5")), **changes)


def batch_of(data: Questions, count: int) -> Sample:
    return Sample(*(torch.stack(field) for field in zip(*(data[index] for index in range(count)), strict=True)))


def write_line(root: Path, number: int, text: str) -> None:
    path = root / "train.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number] = text
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def line(**fields) -> str:
    whole = {"image": "images/00000.png", "question": "Màu gì?", "answer": "đỏ"}
    return json.dumps(
        {name: value for name, value in (whole | fields).items() if value is not None}, ensure_ascii=False
    )


def test_the_same_seed_makes_the_same_files_and_another_seed_others(made, tmp_path):
    for seed, alike in ((0, True), (1, False)):
        make_shapes(tmp_path / str(seed), pictures=12, valid=3, seed=seed)
        for name in (
            "train.jsonl",
            "images/00003.png",
            "students/blip/model.safetensors",
            "students/vit5/model.safetensors",
        ):
            assert ((tmp_path / str(seed) / name).read_bytes() == (made / name).read_bytes()) == alike, name


def test_a_sample_holds_picture_question_and_target_at_fixed_lengths(made):
    data = questions(made)
    for index in (0, 3, len(data) - 1):
        sample = data[index]
        assert sample.image.shape == (3, SIZE, SIZE) and sample.image.dtype == torch.uint8
        assert sample.question.shape == (QUESTION,) and sample.target.shape == sample.weight.shape == (ANSWER,)
        asked = data.asked(index)
        assert sample.at.item() == index
        assert data.ask.decode(sample.question, skip_special_tokens=True).replace(" ?", "?") == asked.question
        assert data.tell.unk_token_id not in sample.target and data.ask.unk_token_id not in sample.question
        assert (sample.weight > 0).equal(sample.target != data.tell.pad_token_id)


def test_what_is_told_back_is_the_answer_that_was_put_in(made):
    data = questions(made, answer_length=60)
    for phase in PHASES:
        told = data.in_phase(phase)
        for index in range(len(told)):
            asked = told.asked(index)
            said = told.tell.decode(told[index].target, skip_special_tokens=True)
            assert answer_in(said) == asked.answer
            assert said.endswith(asked.reason if phase is not ANSWER_FOCUS and asked.reason else asked.answer)


def test_the_phase_is_a_function_of_the_epoch_alone_and_its_borders_belong_to_the_later_one():
    assert [phase_at(epoch).name for epoch in (0, 14, 15, 29, 30, 99)] == [
        "ANSWER_FOCUS", "ANSWER_FOCUS", "FORMAT_LEARNING", "FORMAT_LEARNING", "FULL_REASONING", "FULL_REASONING"
    ]  # fmt: skip
    assert [phase_at(epoch, 1, 1) for epoch in range(3)] == [ANSWER_FOCUS, FULL_REASONING, FULL_REASONING]


def test_the_target_of_a_sample_in_an_epoch_is_the_same_for_a_dataset_made_anew_after_a_cut(made):
    index = next(index for index in range(48) if questions(made).asked(index).reason)
    before = questions(made)
    for epoch in (14, 15, 30):
        after = questions(made)  # another process, which never saw the epochs before
        first, again = (data.in_phase(phase_at(epoch))[index] for data in (before, after))
        assert first.target.equal(again.target) and first.weight.equal(again.weight)
    answer, format_, full = (before.in_phase(phase_at(epoch))[index] for epoch in (14, 15, 30))
    assert not answer.target.equal(format_.target) and format_.target.equal(full.target)
    assert not format_.weight.equal(full.weight)
    assert before.phase is FULL_REASONING, "in_phase leaves the dataset as it is"


def test_each_token_weighs_what_its_part_of_the_target_weighs_in_the_phase(root):
    write_line(root, 0, line(answer="xanh lá", teacher={"answer": "Xanh lá.", "reasoning": "nó có màu xanh lá"}))
    data = questions(root)
    weights = data.in_phase(FORMAT_LEARNING)[0].weight
    assert weights[weights > 0].tolist() == pytest.approx([2, 2, 1, 1, 2, 2, *[0.3] * 5, 2])
    weights = data.in_phase(ANSWER_FOCUS)[0].weight
    assert weights[weights > 0].tolist() == [0.5, 0.5, 1, 1, 0.5]


def test_reasons_for_another_answer_than_the_right_one_are_not_told(root):
    write_line(root, 0, line(answer="đỏ", teacher={"answer": "vàng", "reasoning": "nó có màu vàng"}))
    write_line(root, 1, line(answer="đỏ", teacher={"answer": "đỏ"}))
    write_line(root, 2, line(answer="đỏ"))
    data = questions(root)
    for index in range(3):
        assert data.asked(index).answer == "đỏ" and data.asked(index).reason == ""


def test_a_target_that_is_too_long_loses_its_reasons_end_and_keeps_its_own(made):
    data = questions(made, answer_length=8)
    tokens, weights = data.target(data.asked(0))
    assert len(tokens) == len(weights) == 8 and tokens[-1] == data.tell.eos_token_id


def test_of_a_listing_only_the_places_of_its_lines_are_kept(root):
    data = questions(root)
    assert data.begins.nbytes == 8 * len(data) == 8 * 48
    assert not [value for value in vars(data).values() if isinstance(value, list) and value]
    write_line(root, 47, line(question="Màu của hình tròn là gì?"))  # what is read is read when it is asked for
    assert data.asked(47).answer == "đỏ"


def test_a_limit_takes_questions_from_all_over_the_listing(made):
    data = questions(made, limit=4)
    assert len(data) == 4 and data.begins[-1] == questions(made).begins[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", ":3 is no JSON"),
        ('["a list"]', ":3 has no 'image'"),
        (line(question=None), ":3 has no 'question'"),
        (line(answer="  "), ":3 has no 'answer'"),
        (line(answer=7), "found 7"),
        (line(teacher="đỏ"), "'teacher.answer'"),
        (line(teacher={"answer": "đỏ", "reasoning": ["nó đỏ"]}), "'teacher.reasoning'"),
        (line(image="images/gone.png"), "gone.png"),
    ],
)
def test_a_line_that_is_broken_is_named_before_training_or_left_out_and_counted(root, text, said):
    write_line(root, 2, text)
    with pytest.raises(DataError) as caught:
        questions(root)
    assert said in str(caught.value)
    data = questions(root, skip_broken=True)
    assert len(data) == 47 and len(data.broken) == 1 and said in data.broken[0]


def test_a_picture_cut_short_is_named_when_it_is_its_turn_or_left_out(root):
    path = root / "images" / "00000.png"
    path.write_bytes(path.read_bytes()[:-40])
    data = questions(root)
    with pytest.raises(DataError, match=r"00000\.png"):
        data[0]
    assert len(questions(root, skip_broken=True)) == 44
    path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"00000\.png"):
        questions(root)


def test_a_listing_that_is_missing_empty_or_all_broken_is_told(root):
    with pytest.raises(DataError, match="make_shapes"):
        questions(root, "test")
    (root / "valid.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="is empty"):
        questions(root, "valid")
    (root / "valid.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="no question is left"):
        questions(root, "valid", skip_broken=True)


@pytest.mark.parametrize(
    ("broken", "published"),
    [
        ("blip", "Salesforce/blip-vqa-base"),
        ("blip/config.json", "Salesforce/blip-vqa-base"),
        ("blip/preprocessor_config.json", "Salesforce/blip-vqa-base"),
        ("phobert/model.safetensors", "vinai/phobert-base"),
        ("phobert/bpe.codes", "vinai/phobert-base"),
        ("vit5/tokenizer.json", "VietAI/vit5-base"),
    ],
)
def test_a_folder_that_is_not_whole_is_named_with_what_it_lacks_and_where_to_get_it(root, broken, published):
    path = root / "students" / broken
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError) as caught:
        student(root)
        questions(root)
    assert "is not whole" in str(caught.value) and (path.suffix == "" or path.name in str(caught.value))
    assert f"hf download {published}" in caught.value.next_step


def test_weights_that_are_broken_or_of_something_else_are_told(root):
    path = root / "students" / "blip" / "model.safetensors"
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(DataError, match="image encoder cannot be loaded"):
        student(root)
    shutil.copy(root / "students" / "phobert" / "model.safetensors", path)
    with pytest.raises(DataError, match="image encoder lacks"):
        student(root)


def test_a_question_longer_than_the_encoder_and_a_foreign_tokenizer_are_told(root):
    with pytest.raises(DataError, match="question_length = 65 is more"):
        parts.question_tokens(root / "students" / "phobert", 65)
    with open(root / "students" / "phobert" / "vocab.txt", "a", encoding="utf-8") as file:
        file.write("thêm 1\n")
    with pytest.raises(DataError, match="do not belong together"):
        parts.question_tokens(root / "students" / "phobert", QUESTION)


def test_whole_published_models_are_loaded_though_only_parts_of_them_are_needed(root):
    blip = student(root).image
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
            "encoder_hidden_size": 64}  # fmt: skip
    whole = BlipForQuestionAnswering(BlipConfig(text_config=text, vision_config=blip.config.to_dict()))
    whole.vision_model.load_state_dict(blip.state_dict())
    whole.save_pretrained(root / "students" / "blip")
    roberta = student(root).text
    masked = RobertaForMaskedLM(roberta.config)
    masked.roberta.load_state_dict(roberta.state_dict())
    masked.save_pretrained(root / "students" / "phobert")
    again = student(root)
    for found, kept in ((again.image, blip), (again.text, roberta)):
        weights = found.state_dict()
        assert weights.keys() == kept.state_dict().keys()
        assert all(weights[name].equal(weight) for name, weight in kept.state_dict().items())


def test_every_weight_gets_a_gradient_and_the_answers_have_the_right_shape(made):
    data, net = questions(made), student(made)
    batch = batch_of(data, 3)
    logits_BTV = net(batch.image, batch.question, batch.target)
    assert logits_BTV.shape == (3, ANSWER, len(data.tell))
    token_loss(logits_BTV, batch.target, batch.weight).backward()
    assert not [name for name, weight in net.named_parameters() if weight.grad is None], "DDP would wait for them"
    for beams in (1, 3):
        assert net.eval().say(batch.image, batch.question, beams=beams, length=9).shape == (3, 9)


def test_a_token_is_foretold_from_those_before_it_and_padding_of_the_question_is_not_looked_at(made):
    data, net = questions(made), student(made).eval()
    batch = batch_of(data, 2)
    later = batch.target.clone()
    later[:, 6:] = 5
    first, second = (net(batch.image, batch.question, target) for target in (batch.target, later))
    assert torch.allclose(first[:, :7], second[:, :7], atol=1e-5) and not torch.allclose(
        first[:, 7], second[:, 7], atol=1e-5
    )
    longer = torch.nn.functional.pad(batch.question, (0, 6), value=data.ask.pad_token_id)
    assert torch.allclose(net(batch.image, longer, batch.target), first, atol=1e-4)


def test_decoder_checkpointing_changes_no_gradient(made):
    data = questions(made)
    batch, found = batch_of(data, 2), []
    for checkpointing in (False, True):
        net = student(made, decoder_checkpointing=checkpointing, dropout=0.0)
        assert net.t5.decoder.gradient_checkpointing is checkpointing
        token_loss(net(batch.image, batch.question, batch.target), batch.target, batch.weight).backward()
        found.append([weight.grad for weight in net.parameters()])
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(*found, strict=True))


def test_the_loss_of_a_batch_is_the_mean_of_its_microbatches_whatever_their_targets_length():
    torch.manual_seed(0)
    logits, target, weight = torch.randn(4, 6, 9), torch.randint(9, (4, 6)), torch.rand(4, 6)
    weight[0, 2:], weight[1, 1:] = 0, 0
    whole = token_loss(logits, target, weight)
    pieces = [token_loss(logits[at : at + 1], target[at : at + 1], weight[at : at + 1]) for at in range(4)]
    assert torch.allclose(whole, torch.stack(pieces).mean())


def test_the_student_learns_a_batch_until_it_answers_it(made):
    data, net = questions(made).in_phase(ANSWER_FOCUS), student(made, dropout=0.0)
    batch = batch_of(data, 8)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(60):
        loss = token_loss(net(batch.image, batch.question, batch.target), batch.target, batch.weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    said = data.tell.batch_decode(
        net.eval().say(batch.image, batch.question, beams=2, length=8), skip_special_tokens=True
    )
    right = sum(exact(answer_in(text), data.asked(index).answer) for index, text in enumerate(said))
    assert loss.item() < 0.2 and right >= 7


def test_answers_are_compared_without_case_punctuation_and_form_of_their_marks():
    assert normalised("  Màu  ĐỎ. ") == "màu đỏ"
    assert exact("đo\u0309", "Đỏ!") == 1.0  # a letter and its mark, or both in one
    assert exact("vàng", "vang") == 0.0
    assert exact("a", "") == 0.0


@pytest.mark.parametrize(
    ("said", "right", "f1"),
    [
        ("hình tròn", "hình vuông", 0.5),
        ("đỏ đỏ", "đỏ", 2 / 3),
        ("", "đỏ", 0.0),
        ("Đỏ", "đỏ.", 1.0),
        ("một hai ba", "ba", 0.5),
    ],
)
def test_token_f1_counts_each_word_as_often_as_it_stands_there(said, right, f1):
    assert token_f1(said, right) == pytest.approx(f1)


def test_the_answer_is_found_in_what_was_said_with_reasons_without_and_without_the_format():
    assert answer_in("Trả lời: xanh lá Lý do: nó xanh") == "xanh lá"
    assert answer_in("Trả lời: xanh lá") == "xanh lá"
    assert answer_in(" xanh lá ") == "xanh lá"


def test_the_picture_of_an_answer_shows_right_ones_in_green_and_wrong_ones_in_red(made):
    asked = questions(made).asked(0)
    for text, colour in ((f"Trả lời: {asked.answer}", (26, 127, 55)), ("Trả lời: sai", (180, 35, 24))):
        sheet = side_by_side(asked.image, [(asked, text)])
        assert colour in {found for _, found in sheet.getcolors(1 << 20)}


@pytest.mark.parametrize("name", ["plan.toml", "demo.toml"])
def test_what_the_plans_set_are_arguments_of_both_stages(name):
    path = Path(train.__file__).with_name(name)
    plan = parse(path.read_text(), str(path))
    set_by_rungs = {key for rung in plan.memory.ladder if isinstance(rung, dict) for key in rung["set"]}
    for stage in plan.stage:
        known = inspect.signature({"train": train, "predict": predict}[stage.name].main).parameters
        assert set(stage.args) | set_by_rungs <= set(known)
