"""Notes in a directory: whole, ours, and told apart by launch."""

from __future__ import annotations

import os
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks.store import DirectoryStore

names = st.text(st.characters(), max_size=40)


@settings(deadline=None)
@given(key=names, other=names, note=st.text(st.characters(codec="utf-8")))
def test_a_note_is_found_under_its_key_alone(tmp_path_factory, key, other, note):
    """Whatever the key is made of, what was left is read back, and no other key has it."""
    directory = tmp_path_factory.mktemp("store")
    DirectoryStore(directory).leave(key, note)
    assert DirectoryStore(directory).look(key) == note
    assert (DirectoryStore(directory).look(other) is None) == (other != key)


def test_there_is_no_note_before_one_is_left(tmp_path):
    """A look does not wait, raise or make anything, not even the directory."""
    store = DirectoryStore(tmp_path / "not" / "there")
    assert store.look("key") is None
    assert list(tmp_path.iterdir()) == []


def test_the_later_note_counts(tmp_path):
    """A first rank that was started anew is found where it is now."""
    store = DirectoryStore(tmp_path)
    store.leave("key", "old")
    store.leave("key", "new")
    assert store.look("key") == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_launches_that_share_a_directory_do_not_read_each_others_notes(tmp_path):
    """The job is part of where a note lies."""
    DirectoryStore(tmp_path, job="job 1").leave("key", "note")
    assert DirectoryStore(tmp_path, job="job 1").look("key") == "note"
    assert DirectoryStore(tmp_path, job="job 2").look("key") is None


def test_ranks_that_share_one_of_their_directories_find_each_others_notes(tmp_path):
    """A note is in each, and of several the newest counts."""
    a, b, c = (tmp_path / name for name in "abc")
    DirectoryStore(a, b).leave("key", "old")
    assert DirectoryStore(c, b).look("key") == DirectoryStore(a).look("key") == "old"
    DirectoryStore(b, c).leave("key", "new")
    for note in c.iterdir():
        os.utime(note, ns=(2**62, 2**62))  # later, however coarse the file system's clock is
    assert DirectoryStore(a, c).look("key") == "new"
    assert str(DirectoryStore(a, b)) == f"{a} or {b}"


def test_one_directory_that_can_be_written_is_enough(tmp_path):
    """The note is left where it can be, and only if that is nowhere the error is raised."""
    (tmp_path / "file").touch()
    unwritable, fine = tmp_path / "file" / "a", tmp_path / "b"
    DirectoryStore(unwritable, fine).leave("key", "note")
    assert DirectoryStore(unwritable, fine).look("key") == "note"
    with pytest.raises(NotADirectoryError):
        DirectoryStore(unwritable).leave("key", "note")


def test_nobody_else_can_read_a_note(tmp_path):
    """A note holds a token, so it and its directory are its user's alone."""
    store = DirectoryStore(tmp_path / "notes")
    store.leave("key", "note")
    (note,) = (tmp_path / "notes").iterdir()
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert stat.S_IMODE(note.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_note_of_another_user_is_no_note(tmp_path):
    """In a directory that is open to all, anybody could leave us a note."""
    store = DirectoryStore(tmp_path)
    store.leave("key", "note")
    (note,) = tmp_path.iterdir()
    os.chown(note, 12345, -1)
    assert store.look("key") is None


def test_a_note_that_is_not_text_is_no_note(tmp_path):
    """Whatever lies there, looking raises nothing."""
    store = DirectoryStore(tmp_path)
    store.leave("key", "note")
    (note,) = tmp_path.iterdir()
    note.write_bytes(b"\xff\xfe")
    assert store.look("key") is None


def test_half_a_note_is_never_read(tmp_path):
    """While one rank leaves notes over and over, another reads whole ones only."""
    store = DirectoryStore(tmp_path)
    notes = ["a" * 50_000, "b" * 50_000]
    store.leave("key", notes[0])
    writer = threading.Thread(target=lambda: [store.leave("key", notes[i % 2]) for i in range(200)])
    writer.start()
    while writer.is_alive():
        assert store.look("key") in notes
    writer.join()


def test_a_store_says_where_it_is(tmp_path):
    """Messages name the place where a note was looked for."""
    assert str(DirectoryStore(tmp_path)) == str(tmp_path)
