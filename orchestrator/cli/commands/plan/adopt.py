"""kgorch adopt"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from kgorch.cli.display import render
from kgorch.errors import KgorchError
from kgorch.protocol.values import escape_surrogates
from kgorch.system import files


@click.command("adopt", context_settings={"ignore_unknown_options": True})
@click.argument("program", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("words", nargs=-1, metavar="[-- FLAGS...]")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("plan.toml"), help="File to write."
)
@click.option("--print", "only_print", is_flag=True, help="Print the plan; write nothing.")
@click.option("--foreign", is_flag=True, help="Let a Trainer of a known library save and resume by itself.")
def command(program: Path, words: tuple[str, ...], out: Path, only_print: bool, foreign: bool) -> int:
    """Write a plan for a program as it is, from its source and the flags that you start it with.

    A Trainer of Lightning or Transformers is carried through the sessions, and so is a loop around Accelerate that has no resume
    of its own; any other program must save and resume by itself. The program is read and not run, and so is what it calls in
    modules of its own below the plan's folder; give it the flags that you train with. Library, launcher, place of
    checkpoints, the words by which it continues, its step and its loss are found where the source shows them; what it does not
    show is marked in the plan. `kgorch check` then runs it briefly and says what works.

    `-m package.module` in place of PROGRAM is what `python -m` would run from the plan's folder.

    \b
    Example:
      kgorch adopt train.py --print -- --epochs 10
    """
    from kgorch.plan import parse, program_modules
    from kgorch.plan.adopted_plan import plan_text
    from kgorch.plan.program_inspection import ProgramFindings, inspect, is_carried, why_foreign

    out = out.absolute()
    typed, entry = [str(program)], os.path.relpath(program.absolute(), out.parent)
    if typed[0].startswith("-m"):  # an argument, not an option: behind the program, -m is a flag of the program
        typed, words = [*typed[0].split(), *words][:2], (*typed[0].split(), *words)[2:]
        program, entry = _module(typed, out.parent), " ".join(typed)
    if entry.startswith(".."):
        raise KgorchError(f"{program} is not below {out.parent}", next_step=f"--out {program.parent / 'plan.toml'}")
    if stray := next((word for word in (entry, *words) if escape_surrogates(word) != word), ""):
        raise KgorchError(
            f"{escape_surrogates(stray)} is not UTF-8, and a plan is",
            next_step="give it a name of letters, and the same again",
        )
    if not program.is_file():
        raise KgorchError(f"there is no program {program}", next_step="name the script, then its flags after --")
    found = ProgramFindings(notes=["it is no Python script, so nothing of it was inspected"])
    if program.suffix == ".py":
        try:
            source = program_modules.text_of(program)
            found = inspect(source, words, program_modules.imported(program.absolute(), source, out.parent))
        except program_modules.UNREADABLE as error:
            raise KgorchError(
                f"{program} cannot be parsed", str(error), next_step="correct it, then the same again"
            ) from None
    if not foreign and (choice := why_foreign(found)):
        render.echo(f"note: {choice}", err=True)
    foreign = foreign or not is_carried(found)
    others = {path.name for path in out.parent.glob("*.toml")} - {out.name, "pyproject.toml"}
    is_second = bool(others) and out.name != "plan.toml"
    text = plan_text(
        entry, list(words), found, folder=out.parent.name, plan=out.stem if is_second else "", is_foreign=foreign
    )
    parse(text, out.name)  # what is written is a plan
    if not only_print and os.path.lexists(out):
        again = shlex.join(["kgorch", "adopt", *typed, "--print", *(["--", *words] if words else [])])
        raise KgorchError(
            f"{out} exists already; nothing was written",
            next_step=f"{again}, or --out another.toml",
            error_code="KG503",
        )
    for note in found.notes if foreign else ():
        render.echo(f"note: {note}", err=True)
    if only_print:
        render.echo(text, nl=False)
        return 0
    try:
        files.write(out, text.encode())
    except OSError as error:
        raise KgorchError(
            f"{out} cannot be written", str(error), next_step="--out another.toml", error_code="KG503"
        ) from None
    render.echo(f"wrote {out}")
    render.echo(f"next: kgorch check {shlex.quote(os.path.relpath(out))}")
    return 0


def _module(typed: list[str], folder: Path) -> Path:
    """The source of `-m package.module`. Raises: KgorchError."""
    from kgorch.core.program_command import module_of
    from kgorch.plan.entries import program_of_module

    next_step = "kgorch adopt -m package.module -- FLAGS, in the plan's folder, as for `python -m`"
    module = module_of(" ".join(typed))
    if not module:
        raise KgorchError("-m needs a module", f"found {' '.join(typed[1:]) or 'nothing'}", next_step=next_step)
    if (path := program_of_module(module, folder)) is None:
        searched = f"searched {folder} and the installed packages, for a module's file or a package's __main__.py"
        raise KgorchError(f"there is nothing that python -m {module} would run", searched, next_step=next_step)
    return path
