"""Expanding and folding names, held against ClusterShell's own NodeSet."""

from __future__ import annotations

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from gpulayer.errors import PoolError
from gpulayer.hosts import expand, fold
from gpulayer.ranges import MAX_NAMES, expand_ranges
from gpulayer.values import ValueRefusedError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("head", ["head"]),
        ("gpu-03", ["gpu-03"]),
        ("gpu-[3]", ["gpu-3"]),
        ("gpu-[03-05]", ["gpu-03", "gpu-04", "gpu-05"]),
        ("gpu-[8-11]", ["gpu-8", "gpu-9", "gpu-10", "gpu-11"]),
        ("gpu-[08-11]", ["gpu-08", "gpu-09", "gpu-10", "gpu-11"]),
        ("gpu-[099-101]", ["gpu-099", "gpu-100", "gpu-101"]),
        ("gpu-[5,1-2,03]", ["gpu-5", "gpu-1", "gpu-2", "gpu-03"]),
        ("gpu-[1-7/3]", ["gpu-1", "gpu-4", "gpu-7"]),
        ("gpu-[1, 3]", ["gpu-1", "gpu-3"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
        ("a[1-2]3", ["a13", "a23"]),
        ("[1-2]", ["1", "2"]),
        ("gpu-[03-04],head,a[1,2]", ["gpu-03", "gpu-04", "head", "a1", "a2"]),
        (" b , a ,b", ["b", "a"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    """A list becomes the ids NodeSet gives, in the order written, each once."""
    assert expand(text) == names
    assert set(names) == set(NodeSet(text.replace(" ", ""), resolver=RESOLVER_NOGROUP))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "`` holds an empty name", "write ids as in `gpu-[01-04],gpu-07`"),
        ("a,,b", "`a,,b` holds an empty name", "write ids as in `gpu-[01-04],gpu-07`"),
        ("a,@all", "`@all` is a node group, and groups are not read", "write the node ids themselves"),
        ("gpu-[1-", "`gpu-[1-` holds brackets that are no range", "write a range such as `gpu-[01-16]`"),
        ("gpu-1]", "`gpu-1]` holds brackets that are no range", "write a range such as `gpu-[01-16]`"),
        ("gpu-[]", "`gpu-[]` holds `[]`, which is no range", "write a range such as `[01-16]` or `[1,3-5]`"),
        (
            "gpu-[-1-2]",
            "`gpu-[-1-2]` holds `[-1-2]`, which is no range",
            "write a range such as `[01-16]` or `[1,3-5]`",
        ),
        ("gpu-[3-1]", "`gpu-[3-1]` holds the range `3-1`, which runs backwards", "write `1-3`"),
        (
            "gpu-[1-3/0]",
            "`gpu-[1-3/0]` holds the range `1-3/0`, whose ends do not fit each other",
            "write both ends with as many digits, and a step of 1 or more",
        ),
        ("a[1-999999999]", "`a[1-999999999]` holds the range `1-999999999`, which is longer than 10000", None),
        ("a[1-200]b[1-200]", "`a[1-200]b[1-200]` stands for more than 10000 names", None),
    ],
)
def test_what_cannot_be_expanded(text: str, message: str, hint: str | None) -> None:
    """A malformed list is refused with its piece and the way to write it."""
    with pytest.raises(PoolError) as caught:
        expand(text)
    assert (str(caught.value), caught.value.hint) == (message, hint)


@pytest.mark.parametrize("text", ["a!b", "a&b", "a^b", "a*", "a?", "a b", "-a", ".", "a/b", "$a", "é"])
def test_what_is_no_id(text: str) -> None:
    """NodeSet's operators and wildcards, paths and the like are no ids."""
    with pytest.raises(PoolError) as caught:
        expand(text)
    assert str(caught.value) == (
        f"`{text}` is no node id: letters, digits, `.`, `_` and `-` only, and no `.` or `-` in front"
    )


def test_the_longest_range() -> None:
    """The limit is a limit of names: one range, or the combinations of several."""
    assert len(expand_ranges(f"a[1-{MAX_NAMES}]")) == MAX_NAMES
    with pytest.raises(ValueRefusedError):
        expand_ranges(f"a[0-{MAX_NAMES}]")


@pytest.mark.parametrize("text", ["/data/a,b!c&d^e", "/data/[old]", "fd00::1", "a%sb", "@x", "", "a b"])
def test_text_without_ranges_is_untouched(text: str) -> None:
    """Only numbers in brackets are a range; all else stands for itself."""
    assert expand_ranges(text) == [text]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        (["gpu-03"], "gpu-03"),
        (["gpu-05", "gpu-03", "gpu-04", "gpu-03"], "gpu-[03-05]"),
        (["gpu-9", "gpu-10"], "gpu-[9-10]"),
        (["gpu-08", "gpu-09", "gpu-10"], "gpu-[08-10]"),
        (["gpu-3", "gpu-03"], "gpu-[3,03]"),
        (["head", "gpu-1", "gpu-2"], "gpu-[1-2],head"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r[1-2]n[1-2]"),
        (["gpu-1.x", "gpu-2.x"], "gpu-[1-2].x"),
        (["b a", "a,c"], "b a,a,c"),
        (["a1", "a" + "9" * 200], "a1,a" + "9" * 200),
    ],
)
def test_fold(ids: list[str], text: str) -> None:
    """Ids fold to ranges with their zeros, sorted; odd names are listed as they are."""
    assert fold(iter(ids)) == text


def test_no_group_configuration_is_read(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding and expanding neither read ClusterShell's configuration nor print."""
    monkeypatch.setenv("CLUSTERSHELL_CFGDIR", "/nonexistent")
    assert fold(expand("gpu-[1-3],gpu-5")) == "gpu-[1-3,5]"
    assert capfd.readouterr() == ("", "")
