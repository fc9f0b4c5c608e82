"""Prose from Debian's documentation packages: one paragraph a line, a file an empty line apart.

    python tools/small_model/corpus.py OUT [--cache DIR]

writes OUT/train.txt and OUT/held_out.txt (every fiftieth file). The packages are downloaded with apt-get and unpacked,
not installed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = (
    *("debian-handbook", "debian-reference-en", "debian-policy", "developers-reference", "debian-faq", "debmake-doc"),
    *("python3.11-doc", "perl-doc", "postgresql-doc-15", "git-doc", "rust-doc", "linux-doc-6.1", "apache2-doc"),
    *("python-django-doc", "sqlite3-doc", "nodejs-doc", "octave-doc", "aptitude-doc-en", "maint-guide"),
    *("gnome-user-docs", "python-pandas-doc", "python-sklearn-doc", "installation-guide-amd64"),
)
#: Text of these is prose; what stands inside others, or in these inside of those, is not.
_PROSE = frozenset(("p", "div", "li", "dd", "dt", "h1", "h2", "h3", "h4"))
_SKIPPED = frozenset(("script", "style", "pre", "nav", "table", "head", "header", "footer"))


class _Paragraphs(HTMLParser):
    """Collects the paragraphs of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._text: list[str] = []
        self._prose = False
        self._skipped = 0

    def _end(self) -> None:
        self.found.append("".join(self._text))
        self._text = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SKIPPED:
            self._skipped += 1
        elif tag in _PROSE:
            self._end()
            self._prose = True

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._skipped = max(0, self._skipped - 1)
        elif tag in _PROSE:
            self._end()
            self._prose = False

    def handle_data(self, data: str) -> None:
        if self._prose and not self._skipped:
            self._text.append(data)


def _of_html(text: str) -> list[str]:
    parser = _Paragraphs()
    parser.feed(text)
    parser.close()
    return parser.found


def _of_pod(text: str) -> list[str]:
    text = re.sub(r"[A-Z]<<? ?([^<>]*?) ?>?>", r"\1", text)
    return [p for p in text.split("\n\n") if p[:1] not in (" ", "\t", "=", "")]


def _good(paragraph: str) -> bool:
    """Whether a paragraph is an English sentence, or several."""
    letters = sum(c.isascii() and (c.isalpha() or c in " ,.") for c in paragraph)
    return len(paragraph) >= 60 and letters > 0.93 * len(paragraph) and paragraph[-1] in ".:!?" and " the " in paragraph


def _paragraphs(file: Path) -> list[str]:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = data.decode("utf-8", "replace")
    found = _of_pod(text) if ".pod" in file.suffixes else _of_html(text)
    plain = (re.sub(r"\s+", " ", p.translate({0x2019: "'", 0x201C: '"', 0x201D: '"', 0xB6: None})) for p in found)
    return [p.strip() for p in plain if _good(p.strip())]


def unpack(package: str, cache: Path) -> Path | None:
    """A package's files, downloaded once; none where this Debian has no such package."""
    folder = cache / package
    if not folder.is_dir():
        if subprocess.run(["apt-get", "download", "-q", package], cwd=cache).returncode:
            return None
        deb = next(cache.glob(f"{package}_*.deb"))
        partial = cache / f"{package}.partial"
        subprocess.run(["dpkg-deb", "-x", deb, partial], check=True)
        deb.unlink()
        partial.rename(folder)
    return folder


def texts(packages: tuple[str, ...], cache: Path) -> Iterator[str]:
    """The prose of each file that has some; nothing twice."""
    seen: set[bytes] = set()
    for package in packages:
        folder = unpack(package, cache)
        files = [] if folder is None else sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        n = 0
        for file in files:
            if not re.search(r"\.(html|xhtml|page|pod)(\.gz)?$", file.name):
                continue
            # Translations, and pages of signatures.
            if re.search(
                r"[._/](?!en)([a-z]{2}|pt[-_]br|zh[-_]\w+|[a-z]{2}-[A-Z]{2})[./]|/rust/html/(std|core|alloc)/",
                str(file),
            ):
                continue
            kept = []
            for paragraph in _paragraphs(file):
                digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
                if digest not in seen:
                    seen.add(digest)
                    kept.append(paragraph)
            if sum(map(len, kept)) > 300:
                n += sum(map(len, kept))
                yield "\n".join(kept) + "\n"
        print(f"{package}: {n / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/debian-docs"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.txt").open("w") as train, (args.out / "held_out.txt").open("w") as held_out:
        for i, text in enumerate(texts(PACKAGES, args.cache)):
            (held_out if i % 50 == 49 else train).write(text + "\n")


if __name__ == "__main__":
    main()
