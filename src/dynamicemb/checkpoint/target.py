"""The folder of a checkpoint: where a dump writes, how it is committed, where a reader looks.

A dump fills a hidden folder inside the target. Renaming its manifest to the target's is the commit:
before it, readers see the previous checkpoint or none, after it the new one, whatever happens. Then
the files move to their places, one rename each; a reader looks for a file in the hidden folder
first, so it does not matter how far that came. The next dump finishes what was left.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator

from dynamicemb.checkpoint.files import Directory, ReadFile
from dynamicemb.checkpoint.manifest import (
    BLOCK_BYTES,
    BYTES_PER_BLOCK,
    BYTES_PER_EMPTY_FILE,
    BYTES_PER_FILE,
    COMPRESSION,
    FREE_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    STAGING_PREFIX,
    Manifest,
)
from dynamicemb.checkpoint.manifest_json import check_density, decode, encode
from dynamicemb.checkpoint.names import belongs_to
from dynamicemb.checkpoint.replaced import MissingFileError
from dynamicemb.errors import CheckpointError, CorruptCheckpointError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def naming(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``CheckpointError`` that says what was being done."""
    try:
        yield
    except OSError as error:
        place = error.filename or os.fspath(path)
        raise CheckpointError(f"{doing} {os.fspath(path)!r} failed: {error} ({place})") from error


def open_folder(path: str) -> Directory:
    """The folder of a reader."""
    try:
        with naming("reading", path):
            return Directory.open(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise CheckpointError(f"path is {path!r}; allowed: a folder that exists") from error
        raise


class Target:
    """The folder a dump goes to; used by rank 0, which holds its lock."""

    def __init__(self, path: str, *, allow_overwrite: bool) -> None:
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CheckpointError(f"{path!r} is no folder; allowed: a folder, or nothing there yet")
        self.path = path
        self._folder = Directory.open(path, create=True)
        try:
            if not self._folder.lock():
                raise CheckpointError(f"another dump into {path!r} is running; allowed: one")
            present = [name for name in self._folder.list() if not name.startswith(STAGING_PREFIX)]
            if present and not allow_overwrite:
                raise CheckpointError(
                    f"{path!r} is not empty (it has {present[0]!r}); allowed: an empty folder, or "
                    "allow_overwrite=True"
                )
            self._previous = self._tidy()
        except BaseException:
            self.close()
            raise

    def _tidy(self) -> Manifest | None:
        """Finish the commit that a crash interrupted, and remove dumps that were never committed.
        Returns the manifest that is in force."""
        try:
            manifest = read_manifest(self._folder)
        except CorruptCheckpointError:
            logger.warning("%s has a manifest that cannot be read; it is replaced", self.path)
            manifest = None
        for name in self._folder.list():
            if not name.startswith(STAGING_PREFIX):
                continue
            if manifest is not None and name == STAGING_PREFIX + manifest.id:
                self._settle(manifest)
            else:
                self._folder.remove_tree(name)
        return manifest

    def begin(self, identity: str, folders: Iterable[str]) -> None:
        """Make the hidden folder that all ranks write into; ``folders`` are to be filled."""
        for name in folders:
            if self._folder.exists(name) and not self._folder.is_directory(name):
                raise CheckpointError(
                    f"{os.path.join(self.path, name)} is a file or a link, and the place of a "
                    "collection's folder; allowed: a folder, or nothing there yet"
                )
        self._folder.make_directory(STAGING_PREFIX + identity).close()
        self._folder.sync()

    def commit(self, manifest: Manifest) -> None:
        """Make ``manifest``, whose files are all in the hidden folder, the checkpoint in force."""
        with self._folder.directory(STAGING_PREFIX + manifest.id) as staging:
            self._check_files(staging, manifest)
            data = encode(manifest)
            longest = longest_manifest(self._folder, len(data))
            if len(data) > longest:
                raise CheckpointError(
                    f"the manifest would have {len(data)} bytes; allowed: at most {longest} beside "
                    "these files (names and options of tables are in it)"
                )
            check_density(data, os.path.join(self.path, MANIFEST_NAME))
            with staging.create(MANIFEST_NAME) as file:
                file.write(data)
                file.sync()
            staging.sync()
            self._folder.sync()
            staging.rename(MANIFEST_NAME, self._folder, MANIFEST_NAME)
        self._folder.sync()
        try:  # from here on a failure costs nothing: readers find the files, the next dump goes on
            self._settle(manifest)
            self._remove_previous(manifest)
        except OSError as error:
            logger.warning(
                "the checkpoint in %s is committed, but its folder could not be tidied: %s",
                self.path,
                error,
            )

    @staticmethod
    def _check_files(staging: Directory, manifest: Manifest) -> None:
        """Rank 0 must see what the others wrote."""
        for folder, files in manifest.files().items():
            with staging.directory(folder) as inside:
                for name, entry in files.items():
                    size = inside.size(name)
                    if size != entry.bytes:
                        raise CheckpointError(
                            f"{os.path.join(inside.name, name)} has {size} bytes where rank 0 "
                            f"looks, and {entry.bytes} were written; allowed: a folder on storage "
                            "that all ranks share"
                        )

    def _settle(self, manifest: Manifest) -> None:
        """Move the files of a committed checkpoint to their places."""
        hidden = STAGING_PREFIX + manifest.id
        with self._folder.directory(hidden) as staging:
            for name in staging.list():
                if not staging.is_directory(name):
                    continue
                with (
                    staging.directory(name) as inside,
                    self._folder.make_directory(name, exist_ok=True) as outside,
                ):
                    for file in inside.list():
                        inside.rename(file, outside, file)
                    outside.sync()
        self._folder.remove_tree(hidden)
        self._folder.sync()

    def _remove_previous(self, manifest: Manifest) -> None:
        """Remove files of the checkpoint before, and of tables of the same names."""
        current = manifest.files()
        stems = {
            collection.folder: [table.stem for table in collection.tables.values()]
            for collection in manifest.collections.values()
        }
        before = {} if self._previous is None else self._previous.files()
        for folder in {*before, *current}:
            if not self._folder.is_directory(folder):
                continue
            with self._folder.directory(folder) as inside:
                for name in inside.list():
                    if name in current.get(folder, ()):
                        continue
                    ours = any(belongs_to(stem, name) for stem in stems.get(folder, ()))
                    if ours or name in before.get(folder, ()):
                        inside.remove(name, missing_ok=True)
                empty = not inside.list()
            if empty:
                self._folder.remove_directory(folder)

    def abandon(self, identity: str) -> None:
        """Remove a dump that failed, unless it is in force all the same."""
        with contextlib.suppress(OSError, CheckpointError):  # the next dump tidies
            manifest = read_manifest(self._folder)
            if manifest is None or manifest.id != identity:
                self._folder.remove_tree(STAGING_PREFIX + identity)

    def close(self) -> None:
        self._folder.close()


def open_manifest(folder: Directory) -> ReadFile | None:
    """The file of the manifest in force; ``None`` if there is none."""
    try:
        return folder.read(MANIFEST_NAME)
    except FileNotFoundError:
        return None


def read_manifest(folder: Directory) -> Manifest | None:
    """The manifest in force; ``None`` if there is none."""
    file = open_manifest(folder)
    if file is None:
        return None
    with file:
        return decode_manifest(folder, file)


def decode_manifest(folder: Directory, file: ReadFile) -> Manifest:
    """What the file of a manifest in ``folder`` says."""
    return decode(file.read_all(longest_manifest(folder, file.size)), file.name)


def longest_manifest(folder: Directory, wanted: int) -> int:
    """Bytes that the manifest in ``folder`` may have, as far as they are ``wanted``: a dump writes
    no more of the files that are there."""
    if wanted <= FREE_BYTES:
        return FREE_BYTES
    return min(FREE_BYTES + sum(map(_allowance, _folders_in(folder))), MAX_MANIFEST_BYTES)


def _allowance(folder: Directory) -> int:
    """Bytes of a manifest for the files in the folder of a collection."""
    longest = total = 0
    for name in folder.list():
        size, on_device = folder.allocated(name)
        longest += BYTES_PER_FILE if on_device else BYTES_PER_EMPTY_FILE
        total += min(size, COMPRESSION * on_device)
    return longest + BYTES_PER_BLOCK * (total // BLOCK_BYTES)


def _folders_in(folder: Directory, *, hidden: bool = False) -> Iterator[Directory]:
    """The folders of collections, also those that wait in a hidden one."""
    for name in folder.list():
        try:
            inside = folder.directory(name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        with inside:
            if name.startswith(STAGING_PREFIX) and not hidden:
                yield from _folders_in(inside, hidden=True)
            else:
                yield inside


class CheckpointFiles:
    """Finds the files of a committed checkpoint, wherever its commit left them."""

    def __init__(self, folder: Directory, identity: str) -> None:
        self._folder = folder
        self._staging: Directory | None = None
        if identity:
            # Else all its files are in their places.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._staging = folder.directory(STAGING_PREFIX + identity)

    def open(self, folder: str, name: str) -> ReadFile:
        """The file ``name`` of a collection's folder. A missing one is a ``MissingFileError``."""
        for place in (self._staging, self._folder):
            if place is None:
                continue
            try:
                with place.directory(folder) as inside:
                    return inside.read(name)
            except FileNotFoundError:
                continue
            except NotADirectoryError as error:
                raise CorruptCheckpointError(
                    f"{os.path.join(place.name, folder)} is no folder (a link is not followed)"
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"{os.path.join(place.name, folder, name)} cannot be opened: {error}"
                ) from error
        raise MissingFileError(f"{os.path.join(self._folder.name, folder, name)} is missing")

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
