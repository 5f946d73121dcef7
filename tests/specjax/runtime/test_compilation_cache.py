"""The persistent compilation cache: where it is, and who may set it."""

import io
import os
import stat
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from specjax.runtime import compilation_cache

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture(autouse=True)
def jax_as_started(monkeypatch, tmp_path):
    """jax's options at their defaults, our folder under tmp_path, all restored after."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    for name in OPTIONS:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path / "cache"))
    jax.config.update(OPTIONS[0], None)
    jax.config.update(OPTIONS[1], 1.0)
    jax_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def test_sets_both_where_user_set_neither(tmp_path):
    folder = compilation_cache.enable()
    assert folder is not None
    assert folder.is_relative_to(tmp_path / "cache" / "compilation")
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.0
    assert compilation_cache.enable() == folder


def test_keeps_what_is_compiled_afterwards():
    jax.jit(lambda x: x * 2 + 1)(jnp.ones(3))
    folder = compilation_cache.enable()
    jax.jit(lambda x: jnp.tanh(x) * 3)(jnp.ones(5)).block_until_ready()
    assert any(folder.iterdir())


@pytest.mark.parametrize("option, value", list(zip(OPTIONS, ("/elsewhere", 5.0))))
def test_user_config_leaves_both_alone(option, value):
    jax.config.update(option, value)
    before = [getattr(jax.config, name) for name in OPTIONS]
    assert compilation_cache.enable() is None
    assert [getattr(jax.config, name) for name in OPTIONS] == before


@pytest.mark.parametrize("option", OPTIONS)
def test_user_environment_leaves_both_alone(option, monkeypatch):
    # The minimum compile time at its default: the variable alone says it is wanted.
    monkeypatch.setenv(option.upper(), "1.0")
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("off", ["0", "off", "OFF"])
def test_can_be_switched_off(off, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE_DIR", off)
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_folder_that_cannot_be_made_is_no_failure(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(tmp_path / "file"))
    assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.skipif(sys.platform != "linux", reason="the custom of Linux")
def test_folder_follows_xdg():
    given = {"XDG_CACHE_HOME": "/x"}
    assert compilation_cache.user_cache_dir(given) == Path("/x/specjax")
    home = Path.home() / ".cache" / "specjax"
    assert compilation_cache.user_cache_dir({}) == home
    assert compilation_cache.cache_folder({}).is_relative_to(home / "compilation")


@pytest.fixture
def asked_anew():
    """The processor is asked for once per process, but in this test."""
    yield
    compilation_cache.processor.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_each_kind_of_processor_has_a_folder_of_its_own(monkeypatch):
    """Code compiled for instructions that another processor lacks may end a process there."""
    folders = set()
    for flags in ("flags : fpu avx2", "flags : fpu avx2 avx512f", "Features : asimd"):
        lines = f"processor : 0\n{flags}\n"
        own = lambda *_, lines=lines, **__: io.StringIO(lines)
        monkeypatch.setattr(compilation_cache, "open", own, raising=False)
        compilation_cache.processor.cache_clear()
        folder = compilation_cache.cache_folder()
        assert folder is not None
        assert folder.name == compilation_cache.processor()
        folders.add(folder)
    assert len(folders) == 3


@pytest.mark.usefixtures("asked_anew")
def test_a_host_that_does_not_name_its_instructions(monkeypatch):
    def missing(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(compilation_cache, "open", missing, raising=False)
    names = set()
    for name in ("arm", "i386"):
        monkeypatch.setattr(compilation_cache.platform, "processor", lambda n=name: n)
        compilation_cache.processor.cache_clear()
        names.add(compilation_cache.processor())
    assert len(names) == 2


posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


@pytest.fixture
def own_folder(tmp_path):
    """The folder that `enable` would use, made by it."""
    folder = compilation_cache.enable()
    jax.config.update(OPTIONS[0], None)
    jax.config.update(OPTIONS[1], 1.0)
    compilation_cache._warn_once.cache_clear()
    return folder


def _refused(match):
    with pytest.warns(UserWarning, match=match):
        assert compilation_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


@posix
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_every_folder_is_made_for_the_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = compilation_cache.enable()
    finally:
        os.umask(before)
    assert folder is not None
    made = [p for p in (folder, *folder.parents) if p.is_relative_to(tmp_path / "cache")]
    assert [stat.S_IMODE(p.stat().st_mode) for p in made] == [0o700] * 3


@posix
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(own_folder, mode):
    own_folder.chmod(mode)
    _refused(f"others may write to {own_folder}.*is executed.*SPECJAX_CACHE_DIR")
    own_folder.chmod(0o700)
    assert compilation_cache.enable() == own_folder


@posix
def test_a_folder_below_one_that_others_may_write_to_is_not_used(own_folder):
    parent = own_folder.parents[1]
    parent.chmod(0o777)
    _refused(f"others may write to {parent} ")
    parent.chmod(0o1777)  # sticky, as /tmp: others cannot rename what is in it
    assert compilation_cache.enable() == own_folder


@posix
def test_the_group_may_write_only_where_it_is_the_users_own(own_folder, monkeypatch):
    own_folder.chmod(0o770)
    monkeypatch.setattr(compilation_cache, "_is_own_group", lambda group: False)
    _refused(f"others may write to {own_folder}")
    monkeypatch.setattr(compilation_cache, "_is_own_group", lambda group: True)
    assert compilation_cache.enable() == own_folder


@posix
def test_a_folder_of_another_user_is_not_used(own_folder, monkeypatch):
    """Root too: what another user may write would be run by root."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 12345)
    _refused(f"{own_folder} belongs to another user")


@posix
def test_a_folder_below_one_of_another_user_is_not_used(own_folder, monkeypatch):
    parent = own_folder.parents[1]
    real = Path.stat

    def stat_as_if(self, **arguments):
        info = real(self, **arguments)
        if self != parent:
            return info
        values = list(info)
        values[4] = 54321  # the owner
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", stat_as_if)
    _refused(f"{parent} belongs to another user .54321.")


@posix
def test_a_link_is_looked_at_on_both_ends(own_folder, tmp_path, monkeypatch):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "link").symlink_to(own_folder.parents[1])
    open_to_all.chmod(0o777)
    monkeypatch.setenv("SPECJAX_CACHE_DIR", str(open_to_all / "link"))
    _refused(f"others may write to {open_to_all} ")


@posix
def test_the_warning_comes_once(own_folder, recwarn):
    own_folder.chmod(0o777)
    _refused("others may write")
    assert compilation_cache.enable() is None
    assert not recwarn.list
