"""The documentation does what it says: its commands and snippets run, its links and paths lead somewhere.

A fenced block is run if its info string says so, in the order of its page, in one folder for each page:

    python run                  as a script, to its end, which has to be a good one
    python run file=NAME        likewise, saved under that name first
    python run background       started, and stopped with SIGTERM when the page is over
    sh run                      by sh, with -e
    sh run grpcurl              likewise, where grpcurl is installed; in a test of its own
    text output                 what the block before has to print; … stands for anything within a line

All pages share one cluster; its address takes the place of 127.0.0.1:7070.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tickwheel.embedded.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:7070"
BLOCK_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
SOURCE_FOLDERS = ("docs", "libs", "proto", "services", "tests")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        return "run" in self.words

    @property
    def needs_grpcurl(self) -> bool:
        return "grpcurl" in self.words

    @property
    def file(self) -> str:
        named = [word.removeprefix("file=") for word in self.words if word.startswith("file=")]
        return named[0] if named else f"block-{self.line}.{'py' if self.language == 'python' else 'sh'}"


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    info: str | None = None
    start, lines = 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif info is None:
            info, start, lines = line[3:].strip(), number, []
        else:
            language, *words = info.split() or [""]
            blocks.append(Block(start, language, tuple(words), "\n".join(lines) + "\n"))
            info = None
    assert info is None, f"{name_of(page)}:{start}: the block is not closed"
    return blocks


def expected_output(text: str) -> re.Pattern[str]:
    lines = [re.escape(line).replace("…", ".*") for line in text.strip().splitlines()]
    return re.compile("\n".join(lines))


class PageRunner:
    """Runs the blocks of one page in a folder of its own."""

    def __init__(self, page: Path, folder: Path, cluster: Cluster) -> None:
        self._page = page
        self._folder = folder
        self._address = cluster.api_addresses[0]
        self._background: list[tuple[Block, subprocess.Popen[str]]] = []
        programs = folder / "bin"
        programs.mkdir()
        for name, arguments in (
            ("python", ""),
            ("tickwheel", " -c 'from tickwheel.cli import main; main()'"),
        ):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
            program.chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "libs"),
            "PYTHONUNBUFFERED": "1",
            "TICKWHEEL_ADDRESS": self._address,
        }

    def run(self, block: Block) -> str:
        """What the block wrote to standard output."""
        file = self._folder / block.file
        file.write_text(block.text.replace(ADDRESS, self._address))
        command = ["python", file.name] if block.language == "python" else ["sh", "-eu", file.name]
        if "background" in block.words:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            self._background.append((block, process))
            return ""
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            text=True,
            capture_output=True,
            timeout=BLOCK_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{self._where(block)} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def check(self, block: Block, output: str, wanted: Block) -> None:
        pattern = expected_output(wanted.text.replace(ADDRESS, self._address))
        assert pattern.fullmatch(output.strip()), (
            f"{self._where(block)} prints\n{output}\nand the page says\n{wanted.text}"
        )

    def stop(self) -> None:
        """Ends what runs in the background, which has to be alive until now and to end well."""
        for block, process in self._background:
            alive = process.poll() is None
            process.terminate()
            try:
                _, errors = process.communicate(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                _, errors = process.communicate()
            assert alive, f"{self._where(block)} did not go on:\n{errors}"
            assert process.returncode == 0, f"{self._where(block)} ended with {process.returncode}:\n{errors}"

    def kill(self) -> None:
        for _, process in self._background:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def _where(self, block: Block) -> str:
        return f"{name_of(self._page)}:{block.line}"


def run_page(page: Path, folder: Path, cluster: Cluster, *, grpcurl: bool) -> int:
    """Runs the page's blocks that need grpcurl, or those that do not; how many."""
    blocks = blocks_of(page)
    count = 0
    with ExitStack() as stack:
        runner = PageRunner(page, folder, cluster)
        stack.callback(runner.kill)
        for index, block in enumerate(blocks):
            if not block.runs or block.needs_grpcurl is not grpcurl:
                continue
            count += 1
            output = runner.run(block)
            following = blocks[index + 1] if index + 1 < len(blocks) else None
            if following is not None and "output" in following.words:
                runner.check(block, output, following)
        runner.stop()
    return count


@pytest.fixture(scope="module")
def cluster(short_folder: Path, postgres_bin_folder: Path | None) -> Iterator[Cluster]:
    """What `make up` gives: a coordinator, two timers, a worker with the built-in kinds."""
    running = Cluster(short_folder / "docs", timers=2, workers=1, postgres_bin_folder=postgres_bin_folder)
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_the_snippets_of_a_page_do_what_it_says(page: Path, tmp_path: Path, cluster: Cluster) -> None:
    assert run_page(page, tmp_path, cluster, grpcurl=False) > 0, "nothing in it is marked to be run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in RUN_PAGES if any(block.needs_grpcurl for block in blocks_of(page))], ids=name_of
)
def test_the_grpcurl_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path, cluster: Cluster) -> None:
    if shutil.which("grpcurl") is None:
        pytest.skip("grpcurl is not installed")
    assert run_page(page, tmp_path, cluster, grpcurl=True) > 0


# What needs no cluster.

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SOURCE_PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)*/?[\w.-]+\.(?:py|sql|proto|md|toml|json)(?:::\w+)?")


def text_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The names under which GitHub links a page's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", text_of(page), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        .strip()
        .lower()
        .replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            lost.append(target)
    assert lost == []


def is_named_rightly(reference: str) -> bool:
    """Whether `path` or `path::test` is there, from the root or from libs/tickwheel."""
    path, _, test = reference.partition("::")
    for folder in (ROOT, ROOT / "libs" / "tickwheel"):
        found = folder / path
        if found.exists():
            return not test or re.search(rf"def {test}\b", found.read_text(encoding="utf-8")) is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_that_is_named_exists(page: Path) -> None:
    """On the page of the architecture all paths; elsewhere those that begin with a folder of ours."""
    is_strict = page.name == "ARCHITECTURE.md"
    named = [text for text in CODE.findall(text_of(page)) if SOURCE_PATH.fullmatch(text) and "*" not in text]
    if not is_strict:
        named = [text for text in named if text.partition("/")[0] in SOURCE_FOLDERS and "NNNN" not in text]
    assert len(named) > 30 or not is_strict, "the paths of the page were not found"
    assert [reference for reference in named if not is_named_rightly(reference)] == []


IDENTIFIER = re.compile(r"(?:TICKWHEEL_)?[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+")


@pytest.fixture(scope="module")
def words_of_the_sources() -> frozenset[str]:
    """Every identifier of the code, the contract and the statements, in capitals."""
    files = (
        path
        for folder in SOURCE_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".sql", ".proto"}
    )
    return frozenset(
        word.upper() for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_field_setting_metric_and_event_that_is_named_exists(
    page: Path, words_of_the_sources: frozenset[str]
) -> None:
    """In running text: names with an underscore, between backticks."""
    code = [SOURCE_PATH.sub(" ", text) for text in CODE.findall(text_of(page))]
    named = {word.upper() for text in code for word in IDENTIFIER.findall(text)}
    theirs = {word for word in named if word.startswith(("MY_", "NNNN_"))} | {"XACT_START"}
    known = words_of_the_sources | {f"TICKWHEEL_{word}" for word in words_of_the_sources}
    assert sorted(named - theirs - known) == []


FORBIDDEN = re.compile(
    r"pypi\.org|pythonhosted\.org|registry\.npmjs|crates\.io|proxy\.golang|docker\.io|ghcr\.io|quay\.io"
    r"|(?<![\w.-])/(?:work|root|home|Users)/",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_names_a_registry_or_a_path_of_somebodys_machine(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if FORBIDDEN.search(line)] == []


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text_of(index))}
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    # Decisions are many, and listed by their folder.
    assert sorted(name_of(page) for page in pages - linked if page.parent not in linked) == []


def test_the_states_of_a_run_are_drawn_as_the_table_has_them() -> None:
    done = subprocess.run(
        [sys.executable, "docs/draw_states.py", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "libs")},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
