"""Distil the student from what the teacher said: DDP, mixed precision on CUDA, a curriculum by epoch, scored by its answers.

    alone:          python -m workloads.vqa.train --data shapes --students shapes/students --epochs 2
    on two ranks:   torchrun --nproc-per-node 2 -m workloads.vqa.train --data shapes --students shapes/students --epochs 2
    through walls:  kgorch start workloads/vqa/plan.toml

Lives through cuts: everything that training changes is tracked, and all else is made anew from the arguments; what is told in
an epoch is a function of its number.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from orchestrator.errors import KgorchError
from orchestrator.worker import attach
from workloads import cli
from workloads.common.files import tell_left_out
from workloads.common.record import Record
from workloads.common.scoring import summed
from workloads.vqa import parts
from workloads.vqa.curriculum import answer_in, phase_at
from workloads.vqa.data import Questions, Sample
from workloads.vqa.model import Student, token_loss
from workloads.vqa.scores import exact, token_f1

if TYPE_CHECKING:
    from orchestrator.worker.loader import Loader
    from orchestrator.worker.session import Session


def main(
    data: str,
    students: str,
    image_encoder: str = "blip",
    text_encoder: str = "phobert",
    decoder: str = "vit5",
    epochs: int = 100,
    answer_until: int = 15,
    format_until: int = 30,
    lr: float = 1e-4,
    global_batch: int = 18,
    question_length: int = 64,
    answer_length: int = 160,
    fusion_layers: int = 2,
    dropout: float = 0.1,
    decoder_checkpointing: bool = True,
    beams: int = 5,
    eval_batch: int = 4,
    evaluate_every: int = 1,
    valid_limit: int | None = None,
    valid_length: int = 32,
    weight_decay: float = 1e-2,
    num_workers: int = 0,
    prefetch: int = 2,
    skip_broken: bool = False,
    seed: int | None = None,
) -> None:
    """Train on train.jsonl; the answers to valid.jsonl score it.

    --students is the folder of the three models, named by --image-encoder, --text-encoder and --decoder. Epochs before
    --answer-until tell the answer alone, those before --format-until weigh the format most, the rest tell the reasons too.
    --beams, --eval-batch (questions of one rank at once), --evaluate-every (epochs), --valid-limit (questions) and
    --valid-length (tokens; the answer comes first) are of scoring.
    """
    if not answer_until <= format_until:
        raise KgorchError(
            f"format_until = {format_until} lies before answer_until = {answer_until}",
            next_step="the phases follow one another: answer_until <= format_until",
        )
    with attach(seed=seed) as session:
        if not torch.are_deterministic_algorithms_enabled():
            torch.backends.cudnn.benchmark = True
        folders = [str(Path(students, name)) for name in (image_encoder, text_encoder, decoder)]
        ask, tell = parts.question_tokens(folders[1], question_length), parts.answer_tokens(folders[2])
        student = Student(
            *folders, layers=fusion_layers, dropout=dropout, decoder_checkpointing=decoder_checkpointing
        ).to(session.device)

        def questions(part: str, limit: int | None = None) -> Questions:
            return Questions(
                data, part, ask, tell, size=student.image.config.image_size, question_length=question_length,
                answer_length=answer_length, limit=limit, skip_broken=skip_broken,
            )  # fmt: skip

        train, valid = questions("train"), questions("valid", valid_limit)
        tell_left_out(session, [*train.broken, *valid.broken])
        reading = {"num_workers": num_workers, "prefetch_factor": prefetch if num_workers else None}
        loader, phase = session.loader(train, global_batch, **reading), train.phase
        scored = session.loader(valid, eval_batch * session.world_size, shuffle=False, drop_last=False)

        amp = session.device.type == "cuda"
        net = DistributedDataParallel(student)
        optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=weight_decay)
        scheduler = OneCycleLR(
            optimizer,
            lr,
            total_steps=epochs * len(loader),
            pct_start=0.05,
            anneal_strategy="linear",
            cycle_momentum=False,
        )
        scaler = torch.amp.GradScaler(session.device.type, enabled=amp)
        record = Record(session)
        session.track(model=net, optimizer=optimizer, scheduler=scheduler, scaler=scaler, record=record)

        def loss(part: Sample) -> Tensor:
            with session.autocast(torch.float16, enabled=amp):
                logits = net(part.image, part.question, part.target)
            return token_loss(logits, part.target, part.weight)

        for epoch in session.epochs(epochs):
            if (now := phase_at(epoch, answer_until, format_until)) is not phase:
                # copies of the dataset live in the loading processes, so another phase is another loader
                phase, loader = now, session.loader(train.in_phase(now), global_batch, **reading)
            for batch in session.steps(loader):
                mean_loss = session.backward(batch, loss, scaler=scaler if amp else None)
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                session.report(loss=mean_loss, lr=optimizer.param_groups[0]["lr"])
                scheduler.step()
            if (epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs:
                accuracy, f1 = scores(session, student, valid, scored, beams, min(valid_length, answer_length), amp)
                record.add(epoch=epoch, accuracy=accuracy, f1=f1)

        if session.rank == 0 and not session.supervised:  # under kgorch the last checkpoint holds the weights
            save_model(student, str(session.output / "student.safetensors"))


def scores(
    session: Session, student: Student, valid: Questions, scored: Loader, beams: int, length: int, amp: bool
) -> tuple[float, float]:
    """Share of the answers that match, and mean token F1, over all ranks."""

    def figures(batch: Sample) -> Tensor:
        with session.autocast(torch.float16, enabled=amp):
            said_BT = student.say(batch.image, batch.question, beams=beams, length=length)
        said = [answer_in(text) for text in valid.tell.batch_decode(said_BT, skip_special_tokens=True)]
        right = [valid.asked(index).answer for index in batch.at.tolist()]
        pairs = list(zip(said, right, strict=True))
        found = [sum(exact(*pair) for pair in pairs), sum(token_f1(*pair) for pair in pairs), len(pairs)]
        return torch.tensor(found, device=session.device)

    exacts, f1s, count = summed(session, student, scored, figures)
    return exacts / count, f1s / count


if __name__ == "__main__":
    cli.run(main)
