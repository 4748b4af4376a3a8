"""What the pages tell to type and where they lead: plans, commands, links, the pages written from code, and the site of all."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from kgorch.cli import cli
from kgorch.plan import parse, user_config

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs" / "build_site.py"))
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))
PAGES: list[str] = SITE["pages"]()
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def prose_of(page: str) -> str:
    return FENCE.sub("", text_of(page))


@pytest.mark.parametrize("name", REFERENCE["PAGES"])
def test_a_reference_page_is_what_the_code_says(name):
    assert (REFERENCE["FOLDER"] / f"{name}.md").read_text() == REFERENCE["PAGES"][name](), "make docs"


def test_every_reference_page_has_a_writer():
    assert {path.stem for path in REFERENCE["FOLDER"].iterdir()} == set(REFERENCE["PAGES"])


def plans() -> Iterator[tuple[str, str]]:
    """Page and text of each block of TOML; a name and a stage are added to a part of a plan."""
    for page in PAGES:
        for language, text in FENCE.findall(text_of(page)):
            if language == "toml":
                name = "" if re.search(r"^name = ", text.partition("[")[0], re.M) else 'name = "n"\n'
                has_stage = re.search(r"^(\[\[stage\]\]|stage =)", text, re.M)
                yield page, f"{name}{text}{'' if has_stage else FIRST_STAGE}"


FIRST_STAGE = '\n[[stage]]\nname = "s"\nentry = "s.py"\n'


@pytest.mark.parametrize(("page", "text"), list(plans()), ids=[page for page, _ in plans()])
def test_a_plan_on_a_page_is_a_plan(page, text, tmp_path):
    if "[fleet]" in text:  # the user's configuration
        (tmp_path / "config.toml").write_text(text.removeprefix('name = "n"\n').removesuffix(FIRST_STAGE))
        assert user_config.load({"KGORCH_CONFIG": str(tmp_path / "config.toml")}).fleet.database
    else:
        assert parse(text, page).stage


def commands(page: str) -> Iterator[tuple[str, bool]]:
    """What follows `kgorch` in blocks and in the text, and whether it is in the text, which may leave a value out."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if language not in ("python", "toml", "json")]
    lines = [(line, False) for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^- `[^`\n]+`$", "", prose_of(page), flags=re.MULTILINE)  # lists of messages, in troubleshooting.md
    lines += [(line, False) for line in re.findall(r"^ {4,}(kgorch .*)$", prose, re.MULTILINE)]
    lines += [(line, True) for line in re.findall(r"`([^`\n]+)`", prose)]
    for line, is_prose in lines:
        if "[OPTIONS]" in line:  # how click writes a usage
            continue
        for match in re.finditer(r"(?:^|&& |; |\$ |sudo |!)kgorch (?=[a-z-])", line):
            yield re.split(r" +(?:&&|\||;|>|&|#)", line[match.end() :])[0].rstrip(";"), is_prose


def check_command(typed: str) -> None:
    """Raises: click.UsageError, when a verb or an option does not exist."""
    command: click.Command = cli
    # with the settings of a real one: click keeps the first help option that it makes for a command
    context, words = click.Context(cli, info_name="kgorch", **cli.context_settings), typed.split()
    while isinstance(command, click.Group) and words:
        verb = words[0].partition("|")[0]  # print|install
        # `kgorch quota kaggle` shows that pool
        child = command.get_command(context, verb) or command.get_command(context, "show")
        if child is None:
            if verb.startswith("-"):
                break
            raise click.UsageError(f"no verb {verb}")
        words = words[1:] if verb == child.name else words
        context = click.Context(child, info_name=child.name, parent=context, **child.context_settings)
        command = child
    command.make_parser(context).parse_args(words)


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_the_commands_of_a_page_exist(page):
    for typed, is_prose in commands(page):
        try:
            check_command(typed)
        except click.BadOptionUsage as error:
            assert is_prose and "requires an argument" in str(error), f"kgorch {typed}: {error}"
        except click.UsageError as error:
            pytest.fail(f"{page}: kgorch {typed}: {error}")


@pytest.mark.parametrize("typed", ["begin plan.toml", "checkpoints lost ink", "status --everything", "start --set"])
def test_a_command_that_does_not_exist_is_found(typed):
    with pytest.raises(click.UsageError):
        check_command(typed)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), f"{page}: {link}"


class Loads(HTMLParser):
    """Addresses that a browser loads by itself to show a page, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.classes |= {*values.get("class", "").split()}
        self.loaded += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]
        if "href" in values:
            (self.linked if tag == "a" else self.loaded).append(values["href"])


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    SITE["build"](tmp_path / "site")
    pages = {
        path.relative_to(tmp_path / "site").as_posix(): Loads(path.read_text()) for path in tmp_path.rglob("*.html")
    }
    assert {page.replace("README.md", "index.html").replace(".md", ".html") for page in PAGES} <= pages.keys()
    assert pages["index.html"].loaded and "assets/" in " ".join(pages["index.html"].loaded)
    for name, page in pages.items():
        assert not [address for address in page.loaded if ELSEWHERE.match(address)], name
        # what makes the theme's script fetch Mermaid, or ask GitHub for the repository's stars
        assert not page.classes & {"mermaid", "md-source"}, name
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style.name
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000


def test_a_page_that_is_in_no_group_ends_the_build():
    with pytest.raises(SystemExit, match=r"docs/new\.md"):
        SITE["navigation"]([*PAGES, "docs/new.md"])
    assert SITE["navigation"](["README.md"]) == [{"Home": "README.md"}], "groups without a page are left out"


def test_a_link_to_a_source_becomes_its_text_and_lists_are_set_apart():
    linked: set[str] = set()
    links = "See [`code`](build_site.py), [`x`](../Makefile), [a page](json.md#a), `[a](b.py)`."
    code = "```\n[a](b.py)\n- c\n```\n"
    found = SITE["for_mkdocs"](
        f"{links}\n- one\n  - two\n{code}| `a\\|b` |\n", "docs/some.md", ["docs/json.md"], linked
    )
    assert found == f"{links.replace('[`code`](build_site.py)', '`code`')}\n\n- one\n    - two\n{code}\n| `a|b` |\n"
    assert linked == {"Makefile"}
