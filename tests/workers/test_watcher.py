"""What a process leaves to its watcher; that nothing is left after `kill -9`: test_ray.py."""

from __future__ import annotations

from shoal.workers.process import Watcher


def test_folders_are_removed_with_the_process_that_is_watched(tmp_path):
    folders = [tmp_path / "one", tmp_path / "of\nthree", tmp_path / "not there"]
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / "other").mkdir()
    watcher = Watcher()
    for folder in folders:
        watcher.remove(folder)
    watcher.close()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
