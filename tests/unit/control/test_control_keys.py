"""Key files, trust lists and `asyncfabric keys`: modes, refusals, and what the errors teach."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncfabric.control import LinkKeys, make_keys, open_link, read_keys
from asyncfabric.control.keys import ANY_ROLE, add_trusted, public_file, read_trusted, trust_file, write_keys
from asyncfabric.errors import DeviceError
from asyncfabric_services.keys.command import keys

OTHER = "ab" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "node.key"
    write_keys(path, *make_keys())
    return path


def test_key_files_are_private_and_are_read_back(file: Path) -> None:
    found = read_keys(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert public_file(file).read_text().strip() == found.public
    assert found.trusted == {found.public: ANY_ROLE} and found.secret not in repr(found)
    assert len({found.public, found.secret, *make_keys()}) == 4


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o644])
def test_a_secret_that_others_can_read_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(DeviceError, match=rf"mode {mode:04o}.*chmod 600"):
        read_keys(file)


@pytest.mark.parametrize(
    ("text", "reported"),
    [("", "no line 'public'"), ("public abc\nsecret abc\n", "64 hex digits"), ("\x00\xff garbage", "no line 'public'")],
)
def test_a_broken_key_file_is_distinguished(file: Path, text: str, reported: str) -> None:
    file.write_text(text)
    with pytest.raises(DeviceError, match=reported):
        read_keys(file)


def test_a_missing_key_file_states_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no key file .*asyncfabric keys new"):
        read_keys(tmp_path / "none")


def test_trust_lists_hold_keys_remarks_and_nothing_else(file: Path) -> None:
    assert add_trusted(trust_file(file), OTHER.upper(), "the other\nnode")
    assert not add_trusted(trust_file(file), OTHER)
    assert read_keys(file).trusted == {OTHER: ANY_ROLE, read_keys(file).public: ANY_ROLE}
    assert trust_file(file).read_text() == f"{OTHER} # the other node\n"
    trust_file(file).write_text(f"# remark\n\n{OTHER}\nnonsense\n")
    with pytest.raises(DeviceError, match="line 4"):
        read_keys(file)


def test_a_key_is_added_to_a_list_whose_last_line_has_no_end(file: Path) -> None:
    trust_file(file).write_text(f"{OTHER} # me")
    more = "cd" * 32
    assert add_trusted(trust_file(file), more)
    assert {OTHER, more} < read_keys(file).trusted.keys()


def test_keys_are_bound_to_roles_and_bound_anew_but_never_let_loose_by_adding_them_again(file: Path) -> None:
    both = frozenset(["prefill", "decode"])
    assert add_trusted(trust_file(file), OTHER, "b", both)
    assert trust_file(file).read_text() == f"{OTHER} role=decode,prefill # b\n"
    assert not add_trusted(trust_file(file), OTHER) and not add_trusted(trust_file(file), OTHER, "", both)
    assert read_keys(file).unbound == [read_keys(file).public]
    assert add_trusted(trust_file(file), OTHER, "", frozenset(["router"]))
    assert read_trusted(trust_file(file)) == {OTHER: {"router"}}


@pytest.mark.parametrize("text", ["role=", "rôle=decode", "rol=decode", "role=a,,b", "role=a/b", "role=de code=1"])
def test_a_role_that_is_none_is_refused_with_its_line(file: Path, text: str) -> None:
    trust_file(file).write_text(f"# ours\n{OTHER} {text}\n")
    with pytest.raises(DeviceError, match=r"trusted, line 2.*role"):
        read_keys(file)


def test_lists_of_before_roles_are_read_and_their_keys_may_be_any(file: Path) -> None:
    trust_file(file).write_text(f"{OTHER} of the decode node\n{'cd' * 32} # role=decode\n")
    assert read_trusted(trust_file(file)) == {OTHER: ANY_ROLE, "cd" * 32: ANY_ROLE}


def test_the_command_carries_the_roles_of_a_key_from_its_maker_to_who_trusts_it(tmp_path: Path) -> None:
    run, ours, theirs = CliRunner().invoke, tmp_path / "a.key", tmp_path / "b.key"
    run(keys, ["new", str(ours), "--role", "operator"], standalone_mode=False)
    made = run(keys, ["new", str(theirs), "--role", "prefill", "--role", "decode"], standalone_mode=False)
    public = read_keys(theirs).public
    assert f"asyncfabric keys trust {public} --role prefill --role decode" in made.output
    assert read_keys(theirs).roles == {"prefill", "decode"}
    for given, bound in (([], "decode or prefill"), (["--role", "router"], "router"), ([], "decode or prefill")):
        arguments = ["trust", str(public_file(theirs)), "--file", str(ours), *given]
        assert f"as {bound} (" in run(keys, arguments, standalone_mode=False).output
    shown = run(keys, ["show", str(ours)], standalone_mode=False).output
    assert "as operator\n" in shown and f"trusts {public} as decode or prefill\n" in shown
    wrong = run(keys, ["trust", public, "--file", str(ours), "--role", "decoder"])
    assert wrong.exit_code == 2 and "'decode'" in wrong.output


@pytest.mark.anyio
async def test_a_key_of_another_role_opens_no_link() -> None:
    public, secret = make_keys()
    bound = LinkKeys(public, secret, {public: frozenset(["decode"])})
    for role in ("router", ""):
        with pytest.raises(ValueError, match=rf"is bound to decode, and n is {role or 'no node'}: .*keys new"):
            async with open_link("n", role=role, bind="tcp", keys=bound):
                pass


@pytest.mark.parametrize("mode", [0o622, 0o602, 0o620])
def test_a_trust_list_that_others_can_write_is_refused(file: Path, mode: int) -> None:
    add_trusted(trust_file(file), OTHER)
    trust_file(file).chmod(mode)
    with pytest.raises(DeviceError, match=rf"mode {mode:04o}.*chmod 600"):
        read_keys(file)


def test_a_trust_list_that_is_no_text_is_distinguished_from_the_key(file: Path) -> None:
    trust_file(file).write_bytes(b"\xff\xfe\n")
    with pytest.raises(DeviceError, match=r"trusted, line 1"):
        read_keys(file)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_key_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.key")
    with pytest.raises(DeviceError, match="is no file"):
        read_keys(tmp_path / "x.key")


@pytest.mark.anyio
async def test_a_public_key_of_another_secret_is_refused() -> None:
    (public, _), (_, secret) = make_keys(), make_keys()
    with pytest.raises(ValueError, match="not the one of the secret key"):
        async with open_link("n", bind="tcp", keys=LinkKeys(public, secret)):
            pass


def test_keys_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(ValueError, match="public must be 64 hex digits"):
        LinkKeys("abc", OTHER)
    with pytest.raises(ValueError, match="no public key"):
        LinkKeys(OTHER, OTHER, {"xyz": ANY_ROLE})


def test_the_command_makes_shows_and_trusts(tmp_path: Path) -> None:
    run, path = CliRunner().invoke, tmp_path / "a.key"
    made = run(keys, ["new", str(path), "--json"], standalone_mode=False)
    public = json.loads(made.output)["public"]
    assert public == read_keys(path).public and read_keys(path).secret not in made.output
    run(keys, ["new", str(tmp_path / "b.key")], standalone_mode=False)
    added = run(keys, ["trust", str(tmp_path / "b.key.pub"), "--file", str(path)], standalone_mode=False)
    assert "is trusted now as any role" in added.output
    shown = json.loads(run(keys, ["show", str(path), "--json"], standalone_mode=False).output)
    assert shown["trusted"] == {read_keys(tmp_path / "b.key").public: []} and shown["roles"] == []
    plain = run(keys, ["show", str(path)], standalone_mode=False).output
    assert public in plain and read_keys(path).secret not in plain


def test_the_command_never_overwrites_a_key(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    CliRunner().invoke(keys, ["new", str(path)])
    before = path.read_text()
    again = CliRunner().invoke(keys, ["new", str(path)])
    assert again.exit_code == 2 and "never overwritten" in again.output and path.read_text() == before
    bad = CliRunner().invoke(keys, ["trust", "abc", "--file", str(path)])
    assert bad.exit_code == 2 and "no public key" in bad.output
    absent = CliRunner().invoke(keys, ["trust", str(tmp_path / "b.key.pub"), "--file", str(path)])
    assert absent.exit_code == 2 and "there is no file" in absent.output and "no public key" not in absent.output
