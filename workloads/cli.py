"""A `main` run from a shell: its parameters become the flags, so a script and a plan share one interface."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, get_args, get_origin


def run(main: Callable[..., Any]) -> None:
    """Call `main` with the flags given; a parameter without a default is a required flag.

    Understands str, int, float, bool (`--skip-broken true`), lists of these (`--channels 8 16 32`) and `… | None`.
    """
    summary, _, details = (inspect.getdoc(main) or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for parameter in inspect.signature(main, eval_str=True).parameters.values():
        required = parameter.default is parameter.empty
        kind = parameter.annotation
        if get_origin(kind) is UnionType:
            kind = next(member for member in get_args(kind) if member is not type(None))
        several = get_origin(kind) is list
        kind = get_args(kind)[0] if several else kind
        parser.add_argument(
            f"--{parameter.name.replace('_', '-')}",
            type=truth if kind is bool else kind,
            nargs="+" if several else None,
            required=required,
            default=None if required else parameter.default,
            help="required" if required else f"default: {parameter.default}",
        )
    main(**vars(parser.parse_args()))


def truth(text: str) -> bool:
    """`bool("false")` would be true."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text == "true"
