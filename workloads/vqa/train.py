"""Distil the student from what the teacher said: DDP, mixed precision on CUDA, a curriculum by epoch, scored by its answers.

    alone:          python -m kgorch.workloads.vqa.train --data shapes/train --listing shapes/train.csv --students shapes/students
    on two ranks:   torchrun --nproc-per-node 2 -m kgorch.workloads.vqa.train (the same)
    through walls:  kgorch start workloads/vqa/plan.toml

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments; what counts in
an epoch is a function of its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from kgorch import KgorchError, attach
from kgorch.workloads import cli
from kgorch.workloads.common.files import tell_left_out
from kgorch.workloads.common.record import Record
from kgorch.workloads.common.scoring import summed
from kgorch.workloads.vqa import parts
from kgorch.workloads.vqa.curriculum import parsed, phase_at
from kgorch.workloads.vqa.data import Asked, Questions, Sample, read_questions, split, spread, with_pictures
from kgorch.workloads.vqa.fetch import complete
from kgorch.workloads.vqa.model import Student, token_loss
from kgorch.workloads.vqa.scores import exact, token_f1

if TYPE_CHECKING:
    from kgorch import Loader, Session


def main(
    data: str,
    listing: str,
    students: str,
    teacher: str | None = None,
    valid: str | None = None,
    valid_share: float = 0.1,
    limit: int | None = None,
    image_encoder: str = "blip-vqa-base",
    text_encoder: str = "phobert-base",
    decoder: str = "vit5-base",
    text_tokenizer: str | None = None,
    answer_tokenizer: str | None = None,
    download: bool = False,
    epochs: int = 100,
    answer_until: int = 15,
    format_until: int = 30,
    tag_weight: float | None = None,
    lr: float = 1e-5,
    global_batch: int = 9,
    question_length: int = 64,
    answer_length: int = 160,
    fusion: str = "mlp",
    fusion_layers: int = 2,
    dropout: float = 0.1,
    decoder_checkpointing: bool = True,
    beams: int = 5,
    eval_batch: int = 4,
    evaluate_every: int = 1,
    valid_limit: int | None = None,
    valid_length: int = 32,
    weight_decay: float = 1e-4,
    empty_cache: int = 0,
    num_workers: int = 0,
    prefetch: int = 2,
    skip_broken: bool = False,
    seed: int | None = None,
) -> None:
    """Train on a listing's questions; the answers to those of --valid-share of its pictures score it.

    --data is the folder of the pictures. --listing is teacher_outputs.jsonl, or ViVQA's train.csv with --teacher for the
    reasons; --valid is another listing to score on. --limit trains on so many questions only. --students is the folder of the
    three models, named by --image-encoder, --text-encoder and --decoder; --download fetches those that it lacks;
    --text-tokenizer and --answer-tokenizer are folders of tokenizers that lie elsewhere. Epochs before --answer-until and before
    --format-until weigh answer and format most, the rest the reasons; with --tag-weight all tokens count alike in every epoch, but
    those of the tags so many times. --fusion is mlp or attention, of --fusion-layers layers. --beams, --eval-batch (questions of
    one rank at once), --evaluate-every (epochs), --valid-limit (questions) and --valid-length (tokens; the answer comes first)
    are of scoring. --empty-cache empties CUDA's cache every so many steps.
    """
    if not answer_until <= format_until:
        raise KgorchError(
            f"format_until = {format_until} lies before answer_until = {answer_until}",
            next_step="the phases follow one another: answer_until <= format_until",
        )
    folders = parts.Folders.of(students, image_encoder, text_encoder, decoder, text_tokenizer, answer_tokenizer)
    if download:
        complete(folders.needed)
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        ask, tell = folders.tokenizers(question_length)
        student = Student(
            *folders.models, fusion=fusion, layers=fusion_layers, dropout=dropout, tokens=len(tell),
            decoder_checkpointing=decoder_checkpointing,
        ).to(session.device)  # fmt: skip

        def questions(asked: list[Asked]) -> Questions:
            return Questions(
                asked, session.data(data), ask, tell, size=student.vision_encoder.config.image_size,
                question_length=question_length, answer_length=answer_length,
            )  # fmt: skip

        asked, broken = read_questions(listing, teacher, skip_broken=skip_broken)
        asked, unreadable = with_pictures(asked, data, session=session, skip_broken=skip_broken)
        if valid:
            to_score, more = read_questions(valid, skip_broken=skip_broken)
            to_score, others = with_pictures(to_score, data, session=session, skip_broken=skip_broken, name="valid")
            broken, unreadable = broken + more, unreadable + others
        else:
            asked, to_score = split(asked, valid_share)
        tell_left_out(session, [*broken, *unreadable])
        train, scored_on = questions(spread(asked, limit)), questions(spread(to_score, valid_limit))
        if session.rank == 0:
            print(f"{len(train)} questions to train on, {len(scored_on)} to score on", flush=True)
        reading = {"num_workers": num_workers, "prefetch_factor": prefetch if num_workers else None}
        reading["persistent_workers"] = bool(num_workers)
        loader = session.loader(train, global_batch, **reading)
        scored = session.loader(scored_on, eval_batch * session.world_size, shuffle=False, drop_last=False)

        amp = session.device.type == "cuda"
        net = DistributedDataParallel(student)
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=weight_decay)
        scheduler = CosineAnnealingLR(optimizer, epochs * len(loader), eta_min=lr / 100)
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session)
        session.track(model=net, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)

        for epoch in session.epochs(epochs):
            phase = phase_at(epoch, epochs, answer_until, format_until)
            weights = phase.weights if tag_weight is None else None

            def loss(part: Sample, weights: tuple[float, float, float] | None = weights) -> Tensor:
                with session.autocast(torch.float16, enabled=amp):
                    logits = net(part.image, part.question, part.target)
                return token_loss(logits, part.target, part.part, weights, tag_weight=tag_weight or 1.0)

            for number, batch in enumerate(session.steps(loader), 1):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
                if amp and empty_cache and number % empty_cache == 0:
                    torch.cuda.empty_cache()
            if (epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs:
                accuracy, f1 = scores(session, student, scored_on, scored, beams, min(valid_length, answer_length), amp)
                record.add(epoch=epoch, accuracy=accuracy, f1=f1)
                if amp and empty_cache:
                    torch.cuda.empty_cache()

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_model(student, str(session.output / "student.safetensors"))


def scores(
    session: Session, student: Student, valid: Questions, scored: Loader, beams: int, length: int, amp: bool
) -> tuple[float, float]:
    """Share of the answers that match, and mean token F1, over all ranks."""

    def figures(batch: Sample) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            said_BT = student.say(batch.image, batch.question, beams=beams, length=length)
        said = [parsed(text).answer for text in valid.tell.batch_decode(said_BT, skip_special_tokens=True)]
        right = [valid.asked[index].answer for index in batch.at.tolist()]
        pairs = list(zip(said, right, strict=True))
        found = [sum(exact(*pair) for pair in pairs), sum(token_f1(*pair) for pair in pairs), len(pairs)]
        return torch.tensor(found, device=session.device)

    exacts, f1s, count = summed(session, student, scored, figures)
    return exacts / count, f1s / count


if __name__ == "__main__":
    cli.run(main)
