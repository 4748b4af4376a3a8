"""The student for questions about pictures: curriculum, folders, network, scores. Its users' files: test_vivqa.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import save_model
from transformers import BlipConfig, BlipForQuestionAnswering, RobertaForMaskedLM

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.errors import KgorchError
from kgorch.workloads.vqa import parts
from kgorch.workloads.vqa.curriculum import ANSWER_PART, FORMAT_PART, REASON_PART, TAGS, parsed, phase_at
from kgorch.workloads.vqa.data import Asked, DataError, Questions, Sample, read_questions
from kgorch.workloads.vqa.make_shapes import make_shapes
from kgorch.workloads.vqa.model import FUSIONS, Student, token_loss
from kgorch.workloads.vqa.predict import figures_of, kinds_of, side_by_side
from kgorch.workloads.vqa.scores import exact, normalised, rouge_l, token_f1

QUESTION, ANSWER, SIZE = 12, 28, 32


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "shapes"
    make_shapes(out, pictures=12, test=3, seed=0)
    return out


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "shapes")
    return tmp_path / "shapes"


def folders(root: Path) -> parts.Folders:
    return parts.Folders.of(str(root / "students"), "blip-vqa-base", "phobert-base", "vit5-base")


def questions(root: Path, asked: list[Asked] | None = None, **changes) -> Questions:
    asked = read_questions(root / "train.csv", root / "teacher_outputs.jsonl")[0] if asked is None else asked
    settings = {"size": SIZE, "question_length": QUESTION, "answer_length": ANSWER, **changes}
    return Questions(asked, root / "train", *folders(root).tokenizers(QUESTION), **settings)


def student(root: Path, **changes) -> Student:
    torch.manual_seed(0)
    return Student(*folders(root).models, **changes)


def batch_of(data: Questions, count: int) -> Sample:
    return Sample(*(torch.stack(field) for field in zip(*(data[index] for index in range(count)), strict=True)))


def test_the_same_seed_makes_the_same_files_and_another_seed_others(made, tmp_path):
    for seed, alike in ((0, True), (1, False)):
        make_shapes(tmp_path / str(seed), pictures=12, test=3, seed=seed)
        for name in (
            "train.csv",
            "teacher_outputs.jsonl",
            "train/3.jpg",
            "students/blip-vqa-base/model.safetensors",
            "students/vit5-base/model.safetensors",
        ):
            assert ((tmp_path / str(seed) / name).read_bytes() == (made / name).read_bytes()) == alike, name


def test_a_sample_holds_picture_question_and_target_at_fixed_lengths(made):
    data = questions(made)
    for index in (0, 3, len(data) - 1):
        sample = data[index]
        assert sample.image.shape == (3, SIZE, SIZE) and sample.image.dtype == torch.uint8
        assert sample.question.shape == (QUESTION,) and sample.target.shape == sample.part.shape == (ANSWER,)
        asked = data.asked[index]
        assert sample.at.item() == index
        assert data.ask.decode(sample.question, skip_special_tokens=True).replace(" ?", "?") == asked.question
        assert data.tell.unk_token_id not in sample.target and data.ask.unk_token_id not in sample.question
        assert (sample.part > 0).equal(sample.target != data.tell.pad_token_id)


def test_what_is_told_back_is_the_answer_type_and_reasons_that_were_put_in(made):
    data = questions(made, answer_length=60)
    assert sum(bool(asked.reason) for asked in data.asked) > 40
    for index, asked in enumerate(data.asked):
        found = parsed(data.tell.decode(data[index].target, skip_special_tokens=True))
        assert (found.answer, found.reason, found.kind) == (
            asked.answer,
            asked.reason,
            asked.kind if asked.reason else "",
        )
        assert found.is_whole == bool(asked.reason)


def test_the_phases_and_their_weights_are_those_of_the_users_program():
    """Their borders belong to the later phase, and a phase is a function of the epoch alone."""
    named = {epoch: phase_at(epoch) for epoch in (0, 14, 15, 29, 30, 65, 100)}
    assert [named[epoch].name for epoch in (0, 14, 15, 29, 30)] == [
        "ANSWER_FOCUS", "ANSWER_FOCUS", "FORMAT_LEARNING", "FORMAT_LEARNING", "REASONING_QUALITY"
    ]  # fmt: skip
    for epoch, weights in {
        0: (0.6, 0.35, 0.05),
        15: (0.5, 0.3, 0.2),
        30: (0.3, 0.25, 0.45),
        100: (0.25, 0.15, 0.6),
    }.items():
        assert named[epoch].weights == pytest.approx(weights)
    assert all(sum(phase_at(epoch).weights) == pytest.approx(1) for epoch in range(100))
    assert [phase_at(epoch, 3, 1, 1).name for epoch in range(2)] == ["ANSWER_FOCUS", "REASONING_QUALITY"]


def test_each_token_belongs_to_its_part_of_the_target(made):
    asked = Asked("0.jpg", "Màu gì?", "xanh lá", "nó có màu xanh lá", "SPATIAL")
    part = questions(made, [asked])[0].part
    form, answer, reason = FORMAT_PART, ANSWER_PART, REASON_PART
    assert part[part > 0].tolist() == [form, answer, answer, form, form, form, *[reason] * 5, form, form]
    part = questions(made, [Asked("0.jpg", "Màu gì?", "đỏ")])[0].part
    assert part[part > 0].tolist() == [form, answer, form, form], "tags, answer, end"


def test_a_part_of_the_loss_counts_what_its_phase_says_however_many_tokens_it_has():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    part = torch.tensor([[1, 2, 2, 1, 3, 0], [1, 2, 1, 0, 0, 0]])
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    first = 0.6 * each[0, [0, 3]].mean() + 0.3 * each[0, [1, 2]].mean() + 0.1 * each[0, 4]
    second = (0.6 * each[1, [0, 2]].mean() + 0.3 * each[1, 1]) / 0.9  # no reasons: their weight goes to the others
    assert token_loss(logits, target, part, (0.6, 0.3, 0.1)).item() == pytest.approx(
        ((first + second) / 2).item(), rel=1e-5
    )
    tagged = (3.5 * each[1, [0, 2]].sum() + each[1, 1]) / 8
    assert token_loss(logits[1:], target[1:], part[1:], None, tag_weight=3.5).item() == pytest.approx(
        tagged.item(), rel=1e-5
    )


def test_a_target_that_is_too_long_loses_its_reasons_end_and_keeps_its_own(made):
    data = questions(made, answer_length=8)
    tokens, of_part = data.target(data.asked[0])
    assert len(tokens) == len(of_part) == 8 and tokens[-1] == data.tell.eos_token_id


def test_a_tokenizer_that_cannot_write_a_tag_gets_a_token_and_the_decoder_a_row_for_it(root):
    path = root / "students" / "vit5-base" / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    for piece in described["model"]["vocab"]:  # it knows neither the tags nor their signs
        piece[0] = piece[0].replace("<", "~") if piece[0] not in ("<pad>", "</s>", "<unk>") else piece[0]
    path.write_text(json.dumps(described), encoding="utf-8")
    data = questions(root)
    assert data.tell.get_added_vocab().keys() >= set(TAGS)
    net = student(root, tokens=len(data.tell))
    rows = net.decoder.shared.num_embeddings
    assert rows == len(data.tell) and net.decoder.lm_head.weight.shape[0] == rows
    old = net.decoder.shared.weight[: rows - len(TAGS)]
    assert torch.allclose(net.decoder.shared.weight[-1], old.mean(0), atol=1e-6)
    batch = batch_of(data, 2)
    assert net(batch.image, batch.question, batch.target).shape[-1] == rows
    assert parsed(data.tell.decode(data[0].target, skip_special_tokens=True)).answer == data.asked[0].answer


@pytest.mark.parametrize(
    ("broken", "published"),
    [
        ("blip-vqa-base", "Salesforce/blip-vqa-base"),
        ("blip-vqa-base/config.json", "Salesforce/blip-vqa-base"),
        ("blip-vqa-base/preprocessor_config.json", "Salesforce/blip-vqa-base"),
        ("phobert-base/model.safetensors", "vinai/phobert-base"),
        ("phobert-base/bpe.codes", "vinai/phobert-base"),
        ("vit5-base/tokenizer.json", "VietAI/vit5-base"),
    ],
)
def test_a_folder_that_is_not_whole_is_named_with_what_it_lacks_and_where_to_get_it(root, broken, published):
    path = root / "students" / broken
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError) as caught:
        student(root)
        questions(root)
    assert "is not whole" in str(caught.value) and (path.suffix == "" or path.name in str(caught.value))
    assert published in str(caught.value) and "kgorch.workloads.vqa.fetch" in caught.value.next_step


def test_weights_that_are_broken_or_of_something_else_are_told(root):
    path = root / "students" / "blip-vqa-base" / "model.safetensors"
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(DataError, match="image encoder cannot be loaded"):
        student(root)
    shutil.copy(root / "students" / "phobert-base" / "model.safetensors", path)
    with pytest.raises(DataError, match="image encoder lacks"):
        student(root)


def test_a_question_longer_than_the_encoder_and_a_foreign_tokenizer_are_told(root):
    with pytest.raises(DataError, match="question_length = 65 is more"):
        parts.question_tokens(root / "students" / "phobert-base", 65)
    with open(root / "students" / "phobert-base" / "vocab.txt", "a", encoding="utf-8") as file:
        file.write("thêm 1\n")
    with pytest.raises(DataError, match="do not belong together"):
        parts.question_tokens(root / "students" / "phobert-base", QUESTION)


def test_whole_published_models_are_loaded_though_only_parts_of_them_are_needed(root):
    blip = student(root).vision_encoder
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
            "encoder_hidden_size": 64}  # fmt: skip
    whole = BlipForQuestionAnswering(BlipConfig(text_config=text, vision_config=blip.config.to_dict()))
    whole.vision_model.load_state_dict(blip.state_dict())
    whole.save_pretrained(root / "students" / "blip-vqa-base")
    roberta = student(root).text_encoder
    masked = RobertaForMaskedLM(roberta.config)
    masked.roberta.load_state_dict(roberta.state_dict())
    masked.save_pretrained(root / "students" / "phobert-base")
    again = student(root)
    for found, kept in ((again.vision_encoder, blip), (again.text_encoder, roberta)):
        weights = found.state_dict()
        assert weights.keys() == kept.state_dict().keys()
        assert all(weights[name].equal(weight) for name, weight in kept.state_dict().items())


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_weight_gets_a_gradient_and_the_answers_have_the_right_shape(made, fusion):
    data, net = questions(made), student(made, fusion=fusion)
    batch = batch_of(data, 3)
    logits_BTV = net(batch.image, batch.question, batch.target)
    assert logits_BTV.shape == (3, ANSWER, len(data.tell))
    token_loss(logits_BTV, batch.target, batch.part, (0.3, 0.4, 0.3)).backward()
    assert not [name for name, weight in net.named_parameters() if weight.grad is None], "DDP would wait for them"
    for beams in (1, 3):
        assert net.eval().say(batch.image, batch.question, beams=beams, length=9).shape == (3, 9)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_token_is_foretold_from_those_before_it_and_padding_of_the_question_is_not_looked_at(made, fusion):
    data, net = questions(made), student(made, fusion=fusion).eval()
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
        assert net.decoder.decoder.gradient_checkpointing is checkpointing
        token_loss(net(batch.image, batch.question, batch.target), batch.target, batch.part, (0.3, 0.4, 0.3)).backward()
        found.append([weight.grad for weight in net.parameters()])
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), None])
def test_the_loss_of_a_batch_is_the_mean_of_its_microbatches_whatever_their_targets_length(weights):
    torch.manual_seed(0)
    logits, target, part = torch.randn(4, 6, 9), torch.randint(9, (4, 6)), torch.randint(1, 4, (4, 6))
    part[0, 2:], part[1, 1:] = 0, 0
    whole = token_loss(logits, target, part, weights, tag_weight=3.5)
    each = [slice(at, at + 1) for at in range(4)]
    pieces = [token_loss(logits[at], target[at], part[at], weights, tag_weight=3.5) for at in each]
    assert torch.allclose(whole, torch.stack(pieces).mean())


def test_the_student_learns_a_batch_until_it_answers_it(made):
    data, net = questions(made), student(made, dropout=0.0)
    batch = batch_of(data, 8)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(80):
        loss = token_loss(net(batch.image, batch.question, batch.target), batch.target, batch.part, (0.3, 0.4, 0.3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    said = data.tell.batch_decode(
        net.eval().say(batch.image, batch.question, beams=2, length=8), skip_special_tokens=True
    )
    right = sum(exact(parsed(text).answer, data.asked[index].answer) for index, text in enumerate(said))
    assert loss.item() < 0.3 and right >= 7


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


def test_rouge_l_counts_the_longest_common_run_of_words_with_gaps():
    assert rouge_l("nó có màu đỏ", "Nó có màu xanh lá.") == pytest.approx(2 * 3 / 9)
    assert rouge_l("", "") == 1.0 and rouge_l("đỏ", "") == 0.0


@pytest.mark.parametrize(
    ("said", "answer", "whole"),
    [
        ("<answer> Đen </answer> <reasoning> [DESCRIPTIVE] Màu của chiếc váy là đen. </reasoning>", "Đen", True),
        ("<answer>Đen</answer>\n<reasoning>Nó đen.</reasoning>", "Đen", True),
        ("<answer> xanh lá </answer> <reasoning> [SPAT", "xanh lá", False),
        ("<answer> xanh lá <reasoning> vì", "xanh lá", False),
        ("<reasoning>Băng ghế có màu trắng.</reasoning>", "<reasoning>Băng ghế có màu trắng.</reasoning>", False),
        (" xanh lá ", "xanh lá", False),
    ],
)
def test_the_answer_is_found_in_what_was_said_whole_cut_short_and_without_the_format(said, answer, whole):
    assert parsed(said).answer == answer and parsed(said).is_whole == whole


def test_the_figures_of_a_prediction_count_answers_format_and_reasons():
    asked = [Asked("1.jpg", "?", "đỏ", "nó đỏ", "CAUSAL"), Asked("1.jpg", "?", "xanh", "", "")]
    said = [(asked[0], "<answer>đỏ</answer><reasoning>[CAUSAL] nó đỏ</reasoning>"), (asked[1], "<answer>đỏ</answer>")]
    assert figures_of(said) == {"test_accuracy": 0.5, "test_f1": 0.5, "test_format": 0.5, "test_rouge_l": 1.0}
    assert kinds_of(said) == ["CAUSAL"] and "test_rouge_l" not in figures_of(said[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "stop_at", "after"), [(1, 4, 2), (2, 1, 1), (2, 1, 2)])
def test_a_cut_prediction_goes_on_with_as_many_ranks_and_says_that_it_cannot_with_others(
    made, tmp_path, before, stop_at, after
):
    save_model(student(made), str(tmp_path / "student.safetensors"))
    args = {
        "data": str(made / "train"), "listing": str(made / "train.csv"), "students": str(made / "students"),
        "question_length": QUESTION, "answer_length": ANSWER, "beams": 1, "eval_batch": 1, "limit": 6,
        "weights": str(tmp_path / "student.safetensors"),
    }  # fmt: skip
    entry = "kgorch.workloads.vqa.predict:main"
    cut = ranks.run(tmp_path / "cut", entry, before, args, stop_at=stop_at)
    assert cut.codes == [0] * before, cut.said()
    folder, _ = next(readable_checkpoints(cut.folder / "checkpoints" / "train"))
    resumed = ranks.run(tmp_path / "resumed", entry, after, args, resume=str(folder))
    if before == after:
        assert resumed.codes == [0] * after, resumed.said()
        assert json.loads((resumed.folder / "outputs" / "predictions.json").read_text())["questions"] == 6
    else:
        assert all(resumed.codes)
        assert "start this stage anew" in resumed.said() and "ValueError" not in resumed.said()


def test_the_picture_of_an_answer_shows_right_ones_in_green_and_wrong_ones_in_red(made):
    asked = questions(made).asked[0]
    for text, colour in ((f"<answer>{asked.answer}", (26, 127, 55)), ("<answer>sai", (180, 35, 24))):
        sheet = side_by_side(made / "train" / asked.image, [(asked, text)])
        assert colour in {found for _, found in sheet.getcolors(1 << 20)}


@pytest.mark.parametrize(
    ("version", "fits"), [("4.49.0", False), ("4.50.0", True), ("5.23.0", True), ("6.0.0.dev0", False)]
)
def test_a_version_of_transformers_that_does_not_fit_is_told_with_what_to_install(version, fits):
    if fits:
        parts.see_version(version)
    else:
        with pytest.raises(KgorchError) as caught:
            parts.see_version(version)
        assert caught.value.next_step == 'pip install "transformers>=4.50,<6"'
    bounds = re.findall('"(transformers[^"]*)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert set(bounds) == {"transformers>=4.50,<6"}, "what is installed is what is checked"
