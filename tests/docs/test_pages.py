"""Pages for readers: plain words, links that lead somewhere, and commands, fields and paths that exist."""

import pathlib
import re
import subprocess

import pages
import pytest

from libra_jax import config as config_lib

PLAIN_ROOTS = ("README.md", "CHANGELOG.md", "docs", "libra_jax", "launch", "configs")
"""Files and folders in which the words below are refused."""

ENDINGS = (".md", ".py", ".sh", ".svg", ".yaml", ".jinja", ".j2", ".sbatch", ".ipynb")
"""Endings of the files that are read there."""

BANNED = (
    r"anew",
    r"whoever",
    r"whatever",
    r"befall\w*",
    r"befell",
    r"foretell\w*",
    r"foretold",
    r"foresight",
    r"becomes? of",
    r"became of",
    r"came of",
    r"comes of",
    r"told of",
    r"to and fro",
    r"likewise",
    r"is there",
    r"so many",
    r"so long as",
    r"has not been run yet",
    r"have not been run yet",
)
"""Words and phrases that a reader stumbles over."""

STATUS = "docs/results/status.md"
"""The one page that may say what was not run yet."""

SECTIONS = (
    "model|task|tools|sandbox|reward|rollout|algorithm|critic|optimizer|trainer|warm_start|coordinator|scheduler|planner|elastic|"
    "evaluation|checkpoint|cluster|gateway|telemetry|deadlines"
)
VERL = ("algorithm.adv_estimator", "trainer.save_freq", "trainer.test_freq", "trainer.total_training_steps")
"""Names of verl's, in the page for those who come from there."""

FIELD = re.compile(rf"(?:config\.)?((?:{SECTIONS})\.[a-z_][a-z_0-9.]*)(?:=.*)?")
PATH = re.compile(r"(?<![\w/])(?:libra_jax|launch|configs|docs|tests|third_party)/[\w./-]*")

every_page = pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(pages.ROOT)))


def plain_files() -> list[pathlib.Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PLAIN_ROOTS],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [pages.ROOT / name for name in listed if name.endswith(ENDINGS)]


def test_no_page_and_no_code_uses_a_banned_word():
    words = re.compile(rf"\b(?:{'|'.join(BANNED)})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(pages.ROOT)}:{number}: {match[0]}"
        for path in plain_files()
        if str(path.relative_to(pages.ROOT)) != STATUS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in words.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "lines"), [("README.md", 220), ("CHANGELOG.md", 120)])
def test_front_pages_stay_short(name: str, lines: int):
    assert len((pages.ROOT / name).read_text().splitlines()) <= lines


@every_page
def test_code_fits_a_page_without_scrolling(page: pathlib.Path):
    longest = max(pages.code_lines(page), key=len, default="")
    assert len(longest) <= 100, longest


@every_page
def test_links_lead_to_files_and_headings(page: pathlib.Path):
    for target in pages.links(page):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if pages.GENERATED in there.parents:
            continue  # the build of the documentation checks these
        assert there.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in pages.anchors(there), f"{target}: no such heading"


@every_page
def test_a_link_to_a_page_that_a_clone_lacks_says_what_writes_it(page: pathlib.Path):
    targets = [(page.parent / target.partition("#")[0]).resolve() for target in pages.links(page)]
    if any(pages.GENERATED in target.parents for target in targets):
        assert "`.venv/bin/sphinx-build -b html docs build/docs`" in page.read_text()


@every_page
def test_literals_name_fields_and_paths_that_exist(page: pathlib.Path):
    fields = set(pages.known()["fields"]["run"])
    groups = {name.rsplit(".", 1)[0] for name in fields}
    if page.name == "mechanisms.md":  # its list of what is gone names former settings
        fields |= set(config_lib.REMOVED)
    for literal in pages.literals(page):
        if (match := FIELD.fullmatch(literal)) and not literal.endswith(".py") and literal not in VERL:
            known = match[1] in fields | groups or any(match[1].startswith(f"{name}.") for name in fields)
            assert known, f"`{literal}` is no field of a config"
        for path in PATH.findall(literal) if " " not in literal and "*" not in literal else ():
            assert (pages.ROOT / path).exists(), f"`{literal}`: no {path}"


@every_page
def test_commands_name_scripts_flags_and_fields_that_exist(page: pathlib.Path):
    known = pages.known()
    fields = set(known["fields"]["run"]) | set(known["fields"]["simulated"])
    for command in pages.commands(page):
        scripts = re.findall(r"(?:python|bash) (?:-\S+ )*(launch/\w+\.(?:py|sh)|tests/\S+)", command)
        scripts += re.findall(r"-- (launch/\w+\.py)", command)
        for module in re.findall(r"python -m (tests\.[\w.]+)", command):
            there = pages.ROOT / module.replace(".", "/")
            assert there.with_suffix(".py").exists() or (there / "__main__.py").exists(), f"{command}: no {module}"
        for script in scripts:
            assert (pages.ROOT / script).exists(), f"{command}: no {script}"
        names = [pathlib.Path(script).stem for script in scripts if script.endswith(".py")]
        if "launch/quickstart.sh" in scripts:
            names.append("train")
        for flag in re.findall(r"(?<=\s)--([\w.]+)", command) if names else ():
            if flag.startswith("config."):
                field = flag.removeprefix("config.")
                found = field in fields or any(field.startswith(f"{name}.") for name in fields)
                assert found, f"{command}: no field {field}"
            elif flag != "config_help":
                assert any(flag in known["flags"].get(name, ()) for name in names), f"{command}: no flag --{flag}"
        for config in re.findall(r"--(?:config|of)=(configs/\w+\.py)", command):
            assert (pages.ROOT / config).exists(), f"{command}: no {config}"


def test_every_field_of_the_config_says_what_it_means():
    silent = [name for name, meaning in pages.known()["fields"]["run"].items() if not meaning]
    assert not silent, f"no comment beside {', '.join(silent)}"


def test_the_page_of_workdir_files_names_every_file():
    page = (pages.ROOT / "docs/reference/workdir.md").read_text()
    constant = re.compile(r"^(?:\w+_FILE|\w*_?FOLDER) = \"([\w.]+)\"", re.MULTILINE)
    sources = [path for room in ("libra_jax", "launch") for path in (pages.ROOT / room).rglob("*.py")]
    names = {name for path in sources for name in constant.findall(path.read_text())}
    missing = sorted(name for name in names if f"`{name}" not in page)
    assert not missing, f"docs/reference/workdir.md says nothing about {', '.join(missing)}"


@every_page
def test_sentences_have_at_most_25_words(page: pathlib.Path):
    long = [sentence for sentence in pages.sentences(page) if len(re.findall(r"\S*\w\S*", sentence)) > 25]
    assert not long, "\n".join(long)
