"""Makes a directory of pages equal to the table of pages.

Reconciler: Derived[str, Page] to files.
What a person changes there is put right again; files that are no pages are left alone.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from anyio import to_thread

from finder.tags import Page
from lifecycle import (
    Derived,
    Duration,
    Hook,
    Jobs,
    Lifecycle,
    Reconciler,
    Settings,
    config,
    invoke,
    module,
    provide,
    seconds,
)


class PageSettings(Settings, frozen=True):
    """Settings of the pages cell."""

    pages: Path = Path("pages")
    """Where the pages are written, as TAG.md; made when it is missing."""

    check_every: Duration = seconds(30)
    """How often every page is compared, besides those whose tag changed."""


class Directory:
    """The pages on disk."""

    def __init__(self, settings: PageSettings) -> None:
        self.path = settings.pages

    async def observe(self) -> Mapping[str, Page]:
        """The pages there are."""
        return await to_thread.run_sync(self._read)

    def matches(self, row: Page, observed: Page) -> bool:
        return row == observed

    async def put(self, batch: Mapping[str, Page]) -> None:
        """Write pages."""
        for tag, page in batch.items():
            (self.path / f"{tag}.md").write_text(page.text, encoding="utf-8")

    async def drop(self, batch: Collection[str]) -> None:
        """Remove pages."""
        for tag in batch:
            (self.path / f"{tag}.md").unlink(missing_ok=True)

    async def make(self) -> None:
        """Make the directory unless it is there."""
        self.path.mkdir(parents=True, exist_ok=True)

    def _read(self) -> dict[str, Page]:
        return {
            path.stem: Page(path.stem, path.read_text(encoding="utf-8")) for path in self.path.glob("*.md")
        }


class Pages:
    """Keeps the directory as it should be."""

    def __init__(
        self,
        settings: PageSettings,
        directory: Directory,
        pages: Derived[str, Page],
        lifecycle: Lifecycle,
        jobs: Jobs,
    ) -> None:
        self.reconciler = Reconciler(pages, directory, full_every=settings.check_every)
        lifecycle.append(Hook("make the directory of pages", directory.make))
        jobs.observe("write", self.reconciler)


cell = module("pages", "Pages on disk", config(PageSettings), provide(Directory, Pages), invoke(Pages))
