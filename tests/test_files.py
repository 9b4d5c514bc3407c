"""Files and folders are written whole or not at all."""

import errno
from pathlib import Path

import pytest

from neusight_jax.errors import InputError
from neusight_jax.files import atomic_folder, write_atomically


def _no_space(path: Path) -> None:
    path.write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def _interrupted(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


def test_writes_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out.txt"
    for text in ("one", "two"):
        write_atomically(target, lambda path, text=text: path.write_text(text))  # type: ignore[misc]
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["out.txt"]


def test_temporary_keeps_the_suffix(tmp_path: Path) -> None:
    seen: list[str] = []

    def write(path: Path) -> None:
        seen.append(path.suffix)
        path.write_text("")

    write_atomically(tmp_path / "figure.svg", write)
    assert seen == [".svg"]


@pytest.mark.parametrize(("write", "error"), [(_no_space, InputError), (_interrupted, KeyboardInterrupt)])
def test_failure_keeps_the_old_file(tmp_path: Path, write, error) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "out.txt"
    target.write_text("old")
    with pytest.raises(error):
        write_atomically(target, write)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_disk_full_names_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*out\.txt: No space left on device; nothing was written"):
        write_atomically(tmp_path / "out.txt", _no_space)


def test_disk_full_on_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(InputError, match="No space left"):
        write_atomically(tmp_path / "out.txt", lambda path: path.write_text("x") and None)
    with pytest.raises(InputError, match="No space left"), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
    assert not list(tmp_path.iterdir())


def test_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_atomically(tmp_path / "plain" / "out.txt", lambda path: None)


def test_folder_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with atomic_folder(target) as folder:
        (folder / "a").write_text("x")
        assert not list(target.iterdir())
    assert (target / "a").read_text() == "x"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("raised", "error"), [(OSError(errno.ENOSPC, "full"), InputError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_folder_is_removed_on_failure(tmp_path: Path, raised: BaseException, error: type[BaseException]) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("x")
            raise raised

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_folder_refuses_what_exists(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("x")
    with pytest.raises(InputError, match="is not empty; give a new one"), atomic_folder(tmp_path / "full"):
        pass
    with pytest.raises(InputError, match="is a file, expected a folder"), atomic_folder(tmp_path / "full" / "a"):
        pass
